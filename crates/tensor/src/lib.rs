//! Shapes, dtypes, devices, storage, the tape of coarse operations and flat parameters.
