//! Model directories in and out: config.json and safetensors, atomic writes, one report of every key that does not fit.
