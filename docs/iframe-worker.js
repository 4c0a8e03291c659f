// A page from file:// may start no worker, and the search is one: there it runs in a hidden frame.
// mkdocs-material's offline plugin fetches a script of this name from a network unless there is one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => { throw new Error(`no worker loads ${urls} here`); };
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, location);
      this.ready = new Promise((resolve) => (script.onload = resolve));
      frame.contentDocument.head.append(script);
      this.inside = inside;
    }

    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
