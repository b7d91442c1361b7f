"""Contents of one version: encoding, manifests, reading ranges of tensors; needs no torch."""
