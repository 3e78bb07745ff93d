//! Probing: what can be read off the layers of an encoder that is left as it is.
//!
//! [`probe()`] trains edge probes (Tenney et al. 2019): small classifiers of spans on mixed layers, one that reads all of them, one for
//! each number of layers from the embeddings on, one on a control task with random labels, and one on an encoder with random
//! weights. The encoder runs once over each file; probes are trained on the CPU, each through the same life of a run as everything else.
//! [`compare_heads()`] trains nothing: it compares what attention heads look at with the arcs of a treebank (Clark et al. 2019).
//!
//! Deliberately absent: using a probe as a model. What stays of one is its scores.

mod control;
mod data;
mod encoded;
mod heads;
mod learner;
mod page;
mod recipe;
mod run;
mod scores;

pub use data::{EdgeExample, EdgeSet, EdgeTarget, ProbeTask, read_edges};
pub use heads::{BestHead, Direction, HeadResults, HeadSettings, Relation, compare_heads};
pub use recipe::ProbeRecipe;
pub use run::{ProbeEnded, ProbePlan, probe};
pub use scores::{ControlScore, Counted, Cumulative, ProbeResults, ProbeScore};
