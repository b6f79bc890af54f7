"""GPUs: which one a rank has, and the libraries that they need."""
