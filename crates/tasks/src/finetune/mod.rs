//! From labelled files and a pre-trained model to a fine-tuned one: recipe, plan, the task for the loop, a run in its
//! directory, and a search over many.

mod card;
mod defaults;
mod kept;
mod learner;
mod linear;
mod lists;
mod mixture;
mod plan;
mod pooled;
mod recipe;
mod run;
mod search;
mod sets;
mod split;
mod start;
mod taught;
mod teach;
mod teaching;
mod vectors;
mod words;

pub(crate) use card::{code, listed, plain};
pub use kept::fuzz as fuzz_teacher_outputs;
pub use learner::{Dev, Learner, LearnerSettings};
pub(crate) use learner::{Found, chosen_by, degenerate};
pub use lists::ListObjective;
pub use mixture::{DataSet, Mixing, Mixture};
pub use plan::Plan;
pub use pooled::Poolings;
pub use recipe::FineTuneRecipe;
pub use run::{Ended, FoldScores, LinearScore, Results, finetune, mean_and_deviation};
pub(crate) use run::{RESULTS, UNCHOSEN_CHECKPOINTS, finished};
pub use search::{Cell, Search, SearchEnded, Table, search};
pub use sets::missing_documents;
pub(crate) use sets::{check_documents, read_both, thin};
pub use taught::TaughtObjective;
pub use vectors::{HostObjective, VectorObjective};
