//! The flags of `henson distil`: those of `finetune`, and the teachers'.

use std::path::PathBuf;

use clap::Args;

use super::finetune::Finetune;
use super::labelled::task_names;

/// Named at each of its flags: a heading of the whole would go on to those that follow.
const TEACHERS: &str = "Teachers";

/// The task of pre-training by teachers.
pub(crate) const MLM: &str = "mlm";

#[derive(Args, Debug)]
#[command(
    mut_arg("task", |task| task.value_parser(task_names(&[MLM])).help(
        "What to learn: the task that the teachers were fine-tuned for, or mlm for pre-training from teachers that predict masked tokens"
    )),
    mut_arg("model", |model| model.help(
        "The student: the name of a size, which starts from random weights with the first teacher's tokenizer (bert-L2-H128 to \
         bert-L12-H768, distilbert-base, …), or a model to start from, of any family [default: the recipe's, otherwise the model that \
         comes with henson]"
    )),
    after_help = "\
Teacher and student may have different tokenizers: texts are compared as a whole, tags by words, answers by characters. With --transfer \
and --train the run has two phases: first the teachers on texts without labels, then fine-tuning on the labels (Turc et al. 2019). Keys \
for --set beside those of `finetune`: distil.temperature, distil.alpha (the teachers' share of the loss), distil.epochs and \
distil.learning_rate of the first phase, distil.vectors (mse, cosine) for embed; with --task mlm those of `pretrain`, and \
distil.soft_weight, distil.mlm_weight, distil.cosine_weight, distil.layers, and distil.relations (MiniLM); `henson help settings` lists \
all.\n\n\
The same command resumes where the run was stopped, killed or interrupted.\n\n\
Examples:\n  henson distil --teacher teacher --model bert-L2-H128 --task classify --train train.csv --dev dev.csv --out student\n  \
henson distil --teacher a b c --model henson-12m --task sst2 --data glue --out student --set distil.temperature=4\n  \
henson distil --teacher teacher --model small --task classify --transfer texts.csv --train train.csv --dev dev.csv --out student\n  \
henson distil --teacher sentences --model bert-L4-H256 --task embed --transfer texts.csv --dev STS-B/dev.tsv --out student\n  \
henson distil --teacher bert --model distilbert-base --task mlm --data shards --out distilbert"
)]
pub(crate) struct Distil {
    #[command(flatten)]
    pub(crate) finetune: Finetune,

    /// The teachers: directories of models that were fine-tuned for the task; several are averaged [default: the recipe's]
    #[arg(long, help_heading = TEACHERS, value_name = "DIR", num_args = 1..)]
    pub(crate) teacher: Vec<String>,

    /// Texts without labels to learn from the teachers on; what a table has in other columns is not read. Given several times, all of
    /// them
    #[arg(long, help_heading = TEACHERS, value_name = "FILE")]
    pub(crate) transfer: Vec<String>,

    /// Keep what the teachers say in this directory, for later runs on the same data [default: they are asked about every batch]
    #[arg(long, help_heading = TEACHERS, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
}
