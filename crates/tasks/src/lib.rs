//! The tasks of the paper, and those that users bring: labelled files in, predictions and scores out.
//!
//! The way: a [`Task`] names a benchmark or a general form and knows its files ([`Task::find`]); [`read()`] makes a [`Set`] of
//! [`Example`]s out of one; a model gives a [`Prediction`] for each; [`score()`] holds them against the labels by the
//! official definitions ([`metrics`]); [`prediction_files`] writes them as each benchmark wants them, and
//! [`read_predictions`] reads such files again.
//!
//! A model is made by [`finetune()`]: a [`FineTuneRecipe`] becomes a [`Plan`], which runs in a directory; [`search()`] runs many
//! and keeps the best. [`train_tagger()`] leaves the encoder as it is and trains a tagger on vectors of its layers.
//! [`predict()`] asks models, one or several at once.
//!
//! What is deliberately absent: pieces and windows (`text`), the loop and the run's directory (`train`), and printing.

#![forbid(unsafe_code)]

mod batches;
mod bm25;
mod distil;
mod error;
mod example;
mod features;
mod finetune;
mod forms;
mod forward;
mod framed;
pub mod metrics;
mod mining;
mod nearest;
mod paraphrases;
mod passages;
mod predict;
mod predictions;
mod prepare;
mod probe;
mod ranking;
mod read;
mod retrieval;
mod score;
mod sentences;
mod tags;
mod task;
mod vector_cache;
mod write;

pub use bm25::Bm25;
pub use distil::{DistilSettings, VectorDistance};
pub use error::TaskError;
pub use example::{Answer, Example, Input, Set, Span, Target, Words};
pub use features::{FeatureLayers, Tagger, TaggerHead, TaggerPlan, TaggerRecipe, train_tagger};
pub use finetune::{
    Cell, DataSet, Dev, Ended, FineTuneRecipe, FoldScores, HostObjective, Learner, LearnerSettings, LinearScore,
    ListObjective, Mixing, Mixture, Plan, Poolings, Results, Search, SearchEnded, Table, TaughtObjective,
    VectorObjective, finetune, mean_and_deviation, missing_documents, search,
};
pub use forms::report_twins;
pub use mining::{MiningSettings, mine};
pub use nearest::{Near, nearest_of};
pub use paraphrases::Paraphrases;
pub use passages::{FoundPassages, PassageLength, PassagePlace, SkippedPath, SourcedPassage, passages_of};
pub use predict::{PredictSettings, predict, reading_for};
pub use predictions::{Candidate, Prediction, prediction_files, read_null_odds, read_predictions};
pub use prepare::{Instance, Lengths, instances};
pub use probe::{
    BestHead, ControlScore, Counted, Cumulative, Direction, EdgeExample, EdgeSet, EdgeTarget, HeadResults,
    HeadSettings, ProbeEnded, ProbePlan, ProbeRecipe, ProbeResults, ProbeScore, ProbeTask, Relation, compare_heads,
    probe, read_edges,
};
pub use ranking::RankLoss;
pub use read::{Files, Paths, Reading, Trained, read};
pub use retrieval::{Collection, Passage, read_passages};
pub use score::{LabelScore, Mistake, Score, score};
pub use sentences::{Distance, SentenceLoss};
pub use tags::{Scheme, convert_tags};
pub use task::{Split, TASKS, Task};
pub use vector_cache::VectorCache;
pub use write::{Resampling, Writing};

/// The readers of files that henson keeps for itself, over bytes in memory: for the targets in `fuzz/`, and for nothing else.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::finetune::fuzz_teacher_outputs as teacher_outputs;
    pub use crate::vector_cache::fuzz as vector_cache;
}
