//! Objectives, optimizers and the training step.
