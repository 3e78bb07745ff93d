//! Objectives, optimizers, schedules, recipes, the loop, and the directory of a run.
//!
//! The way in: a [`Recipe`] becomes a [`Plan`], which makes an [`Engine`] and a [`Task`]; a [`TrainingRun`] takes them through
//! the life of a run, in its [`RunDirectory`].
//!
//! What a model is trained for stands here, not in the model: a loss is a sum over predictions, divided by how many
//! there are in the whole step, so that accumulated parts add up to the large batch.
#![forbid(unsafe_code)]

mod cost;
mod distil;
mod error;
mod life;
mod losses;
pub mod metrics;
pub mod objective;
mod pretraining;
mod recipe;
mod relations;
pub mod replaced;
pub mod report;
mod run;
pub mod scaling;
mod schedule;
mod settings;
pub mod soft;
pub mod span_boundary;
mod stream;
pub mod tensorboard;
mod together;
mod trainer;
mod update;
mod workload;

pub use cost::{Footprint, TokenCounts};
pub use distil::TeacherSettings;
pub use error::{Result, TrainError};
pub use life::TrainingRun;
pub use losses::{EQUAL, LossNames, LossWeights, Losses};
pub use pretraining::{Plan, PreTraining, pretrain};
pub use recipe::{
    AdafactorSettings, MOST_BELOW_1, OptimizerKind, Phase, Precision, Recipe, ResolvedPhase, check_counts,
    check_ranges, differences, parse_settings, to_toml,
};
pub use relations::Relation;
pub use replaced::GeneratorSettings;
pub use run::{Best, Carried, GeneratorFiles, ModelFiles, RunDirectory, RunRecipe, State};
pub use schedule::{ByEpoch, Schedule, ScheduleKind};
pub use settings::{Setting, choices_of, settings};
pub use together::{agree, check_parts, digest};
pub use trainer::{Engine, Evaluation, Event, Keep, LoopSettings, Outcome, Task, Underway, Watch, Work};
pub use update::{Clip, OptimizerSettings, Updater};
pub use workload::{Rank, Workload};
