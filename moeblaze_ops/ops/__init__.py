"""The ops, one file each: schema, checks, fake, device functions and autograd."""
