//! A model directory in, answers out: fill, embed, features; batching without padding.
