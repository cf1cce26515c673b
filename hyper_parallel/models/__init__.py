"""Small models in ordinary single-device code, one file per backend."""
