//! Slices in, slices out: the numeric kernels, each beside its naive reference; knows no tensor.
