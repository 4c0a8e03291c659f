"""A plugin of axolotl that runs the experts of a model by moeblaze.

    plugins:
      - moeblaze_ops.integrations.axolotl.MoeblazePlugin
    torch_compile: true    # layers are rewritten; without it experts run as experts_implementation: moeblaze

It needs axolotl 0.19. Models, adapters, data and trainers are those of axolotl.
"""

from typing import Any

from moeblaze_ops.integrations.transformers import NAME

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise ImportError("moeblaze_ops.integrations.axolotl needs axolotl 0.19: pip install axolotl") from error


class MoeblazePlugin(BasePlugin):
    """Turns rewriting on where axolotl compiles, and chooses the experts implementation where it does not."""

    def pre_model_load(self, cfg: Any) -> None:
        if (cfg.expert_parallel_size or 1) > 1:
            rule = "expert_parallel_size must be 1 with MoeblazePlugin"
            raise NotImplementedError(f"axolotl: {rule}, got {cfg.expert_parallel_size}: axolotl's own plugin moves tokens there")
        if cfg.torch_compile:
            from moeblaze_ops.compile.switch import enable  # which imports torch.compile

            enable()
        elif cfg.experts_implementation in (None, NAME):
            cfg.experts_implementation = NAME
        else:
            rule = f"experts_implementation must be unset or {NAME!r} without torch_compile"
            raise ValueError(f"axolotl: {rule}, got {cfg.experts_implementation!r}")
