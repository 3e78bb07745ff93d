//! The table of tasks: the paper's benchmarks and the general forms. All that is special about a benchmark's files stands
//! here, and nowhere else.

use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use henson_infer::Task as Ability;

use crate::error::TaskError;
use crate::forms::{
    ANSWER, CHOOSE, CLASSIFY, CLOZE, COMMITMENT, COPA, EMBED, ENTITIES, Form, JUDGE, MULTILABEL, PAIR, RANK, REGRESS,
    SEQ2SEQ, SPAN, SPAN_PAIR, TEXT_CLASS, TEXT_NUMBER, TEXT_PAIR, WINOGENDER, WORDS,
};

/// A part of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// To train on.
    Train,
    /// To choose the model by.
    Dev,
    /// To report on; often without labels.
    Test,
}

impl Split {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "training",
            Self::Dev => "dev",
            Self::Test => "test",
        }
    }
}

/// A benchmark or a general form.
#[derive(Clone, Debug)]
pub struct Task {
    /// What `--task` calls it.
    pub name: &'static str,
    /// What is predicted, and how.
    pub(crate) form: &'static Form,
    /// The directory that its files have in the benchmark's archive.
    pub directory: &'static str,
    /// Names of the files to train on, to choose by and to report on, as they are distributed, with spaces between them; a `*`
    /// stands for anything. Each may also be compressed.
    pub files: [&'static str; 3],
    /// The labels as the files write them, in the order of their numbers (those of GLUE as `transformers`' examples train
    /// it, from the `datasets` library); empty: learned from the file.
    pub labels: &'static [&'static str],
    /// What the labels mean, for config.json; empty where the files' own words are clear.
    pub meanings: &'static [&'static str],
    /// The score that chooses the best model, a field of [`crate::Score::metrics`].
    pub metric: &'static str,
    /// What the benchmark calls its prediction file.
    pub submission: Option<&'static str>,
    /// The columns of its tables.
    pub(crate) columns: TaskColumns,
    /// Whether a question may be without answer.
    pub may_be_unanswerable: bool,
    /// Tokens of a sequence in training, where nothing else is said and its texts are longer than those of its form.
    pub(crate) length: Option<usize>,
    /// The task whose models are asked, where it has no files to train on.
    pub(crate) models_of: Option<&'static str>,
    /// Whether its pairs mean the same in both orders.
    pub(crate) symmetric: bool,
}

/// The names that columns may have in a task's own files, the first that is there wins.
#[derive(Clone, Debug)]
pub(crate) struct TaskColumns {
    pub(crate) first: &'static [&'static str],
    pub(crate) second: &'static [&'static str],
    pub(crate) label: &'static [&'static str],
    pub(crate) id: &'static [&'static str],
    /// (first text, label, columns in all) in files without a header.
    pub(crate) without_header: Option<(usize, usize, usize)>,
}

/// Names are unique.
impl PartialEq for Task {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Hash for Task {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl Task {
    /// What a model with its head can be asked; none where that is a plain encoder, whose vectors are compared.
    pub fn ability(&self) -> Option<Ability> {
        Ability::of_head(self.form.head(2))
    }

    /// Whether predictions are read off texts that a model writes.
    pub fn writes(&self) -> bool {
        self.form.writes
    }

    /// Whether vectors of texts are compared, which any encoder has.
    pub fn compares(&self) -> bool {
        self.ability().is_none() && !self.writes()
    }

    /// Whether longer texts can be divided into windows.
    pub fn can_divide(&self) -> bool {
        !self.form.reads_whole && self.ability().is_some()
    }

    /// The task of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TASKS.iter().find(|task| task.name == name)
    }

    /// The same task with labels or numbers as texts that a model writes, where it has a class or a number for a text or two.
    pub fn as_text(&self) -> Option<&'static Self> {
        static WRITTEN: LazyLock<Vec<Task>> = LazyLock::new(|| {
            let written = |task: &Task| {
                let forms = [(&CLASSIFY, &TEXT_CLASS), (&PAIR, &TEXT_PAIR), (&REGRESS, &TEXT_NUMBER)];
                let (_, form) = forms.into_iter().find(|(form, _)| std::ptr::eq(*form, task.form))?;
                Some(Task { form, length: None, ..task.clone() })
            };
            TASKS.iter().filter_map(written).collect()
        });
        WRITTEN.iter().find(|task| *task == self)
    }

    /// What a label's number means, for config.json.
    pub fn meaning<'a>(&'a self, labels: &'a [String], number: usize) -> &'a str {
        self.meanings.get(number).copied().or(labels.get(number).map(String::as_str)).unwrap_or("?")
    }

    /// The file with a part of the set, in its own directory or the one above.
    pub fn find(&'static self, directory: &Path, split: Split) -> Result<PathBuf, TaskError> {
        let patterns = self.files[split as usize];
        let places = match self.directory {
            "" => vec![directory.to_owned()],
            own => vec![directory.join(own), directory.to_owned()],
        };
        for place in &places {
            let names = names_in(place);
            for pattern in patterns.split(' ') {
                let found: Vec<&String> = names.iter().filter(|name| matches(pattern, uncompressed(name))).collect();
                match found[..] {
                    [] => {}
                    [one] => return Ok(place.join(one)),
                    _ => {
                        let found = found.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
                        return Err(TaskError::SeveralFiles { directory: place.clone(), split: split.name(), found });
                    }
                }
            }
        }
        if let (true, Some(other)) = (patterns.is_empty(), self.models_of) {
            return Err(TaskError::OnlyScored { task: self.name, split: split.name(), other });
        }
        let mut looked = patterns.replace(' ', ", ");
        if !self.directory.is_empty() {
            looked += &format!(" (also in {}/)", self.directory);
        }
        Err(TaskError::NoFile { directory: directory.to_owned(), split: split.name(), task: self.name, looked })
    }
}

/// The names of a directory's files, sorted; none where it cannot be read, which the search then reports.
pub(crate) fn names_in(directory: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

fn uncompressed(name: &str) -> &str {
    name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(name)
}

/// Whether a name is that of a pattern with at most one `*`.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, end)) => name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end),
    }
}

const GLUE_FILES: [&str; 3] = ["train.tsv", "dev.tsv", "test.tsv"];

/// Any table.
const TABLES: [&str; 3] = [
    "train.tsv train.csv train.jsonl train.parquet train.txt train.json",
    "dev.tsv dev.csv dev.jsonl dev.parquet dev.txt dev.json validation.tsv validation.csv validation.jsonl validation.parquet \
     validation.json val.tsv val.csv val.jsonl val.parquet val.json",
    "test.tsv test.csv test.jsonl test.parquet test.txt test.json",
];

/// Column files: CoNLL-2003's own names, and those that people use.
const SENTENCES: [&str; 3] = [
    "eng.train train.txt train.conll train.bio train.tsv train.jsonl train.parquet *-ud-train.conllu train.conllu \
     train.json",
    "eng.testa testa.txt valid.txt dev.txt dev.conll dev.bio dev.tsv dev.jsonl dev.parquet validation.parquet \
     *-ud-dev.conllu dev.conllu dev.json",
    "eng.testb testb.txt test.txt test.conll test.bio test.tsv test.jsonl test.parquet *-ud-test.conllu test.conllu \
     test.json",
];

const SUPERGLUE_FILES: [&str; 3] =
    ["train.jsonl train.parquet", "val.jsonl dev.jsonl validation.jsonl validation.parquet", "test.jsonl test.parquet"];

const IDS: &[&str] = &["index", "id", "idx", "pairID", "pair_ID", "guid"];

/// The general forms look for what such columns are usually called.
const ANY_FIRST: &[&str] =
    &["text", "sentence1", "text1", "premise", "question1", "question", "sentence_A", "sentence", "content", "review"];
const ANY_SECOND: &[&str] = &["sentence2", "text2", "hypothesis", "question2", "sentence", "sentence_B", "second"];
const ANY_LABEL: &[&str] = &["label", "labels", "class", "category", "gold_label", "score", "answer", "target"];

type Names = &'static [&'static str];

const fn columns(first: Names, second: Names, label: Names, id: Names) -> TaskColumns {
    TaskColumns { first, second, label, id, without_header: None }
}

const NO_COLUMNS: TaskColumns = columns(&[], &[], &[], IDS);
const ANY: TaskColumns = columns(ANY_FIRST, ANY_SECOND, ANY_LABEL, IDS);

const BINARY: &[&str] = &["0", "1"];
const TRUTH: &[&str] = &["false", "true"];
/// In the order of the `datasets` library.
const COMMITMENTS: &[&str] = &["entailment", "contradiction", "neutral"];
const ENTAILS: &[&str] = &["entailment", "not_entailment"];
const NLI: &[&str] = &["entailment", "neutral", "contradiction"];

const NLI_COLUMNS: TaskColumns = columns(
    &["sentence1", "premise"],
    &["sentence2", "hypothesis"],
    &["gold_label", "label"],
    &["index", "pairID", "idx"],
);

const SENTENCE: TaskColumns = columns(&["sentence"], &[], &["label"], &["index", "idx"]);
const SENTENCES_1_2: TaskColumns = columns(&["sentence1"], &["sentence2"], &["label"], &["index", "idx"]);

const PREMISE_HYPOTHESIS: TaskColumns = columns(&["premise"], &["hypothesis"], &["label"], &["idx"]);

/// What most tasks have in common.
const fn task(name: &'static str, form: &'static Form, metric: &'static str) -> Task {
    Task {
        name,
        form,
        directory: "",
        files: TABLES,
        labels: &[],
        meanings: &[],
        metric,
        submission: None,
        columns: ANY,
        may_be_unanswerable: false,
        length: None,
        models_of: None,
        symmetric: false,
    }
}

const fn glue(
    name: &'static str,
    form: &'static Form,
    directory: &'static str,
    labels: &'static [&'static str],
    metric: &'static str,
    submission: &'static str,
) -> Task {
    let columns = SENTENCES_1_2;
    Task { directory, files: GLUE_FILES, labels, submission: Some(submission), columns, ..task(name, form, metric) }
}

/// A task of SuperGLUE, whose archive has a directory of JSON lines for each.
const fn superglue(
    name: &'static str,
    form: &'static Form,
    directory: &'static str,
    labels: &'static [&'static str],
    metric: &'static str,
    submission: &'static str,
) -> Task {
    let (files, columns) = (SUPERGLUE_FILES, PREMISE_HYPOTHESIS);
    Task { directory, files, labels, submission: Some(submission), columns, ..task(name, form, metric) }
}

/// All tasks. In dev and test files GLUE's columns have the same names as in those to train on, but for CoLA's, whose test
/// file alone has a header.
pub static TASKS: [Task; 38] = [
    Task {
        meanings: &["unacceptable", "acceptable"],
        columns: TaskColumns { without_header: Some((3, 1, 4)), ..SENTENCE },
        ..glue("cola", &CLASSIFY, "CoLA", BINARY, "matthews", "CoLA.tsv")
    },
    Task {
        meanings: &["negative", "positive"],
        columns: SENTENCE,
        ..glue("sst2", &CLASSIFY, "SST-2", BINARY, "accuracy", "SST-2.tsv")
    },
    Task {
        meanings: &["not_equivalent", "equivalent"],
        files: ["train.tsv msr_paraphrase_train.txt", "dev.tsv", "test.tsv msr_paraphrase_test.txt"],
        columns: TaskColumns {
            first: &["#1 String", "sentence1"],
            second: &["#2 String", "sentence2"],
            label: &["Quality", "label"],
            ..SENTENCES_1_2
        },
        symmetric: true,
        ..glue("mrpc", &PAIR, "MRPC", BINARY, "f1", "MRPC.tsv")
    },
    Task {
        columns: TaskColumns { label: &["score", "label"], ..SENTENCES_1_2 },
        symmetric: true,
        ..glue("stsb", &REGRESS, "STS-B", &[], "pearson", "STS-B.tsv")
    },
    Task {
        meanings: &["not_duplicate", "duplicate"],
        columns: columns(&["question1"], &["question2"], &["is_duplicate", "label"], &["id", "index", "idx"]),
        symmetric: true,
        ..glue("qqp", &PAIR, "QQP", BINARY, "f1", "QQP.tsv")
    },
    Task {
        files: [
            "train.tsv multinli_1.0_train.jsonl",
            "dev_matched.tsv multinli_1.0_dev_matched.jsonl",
            "test_matched.tsv",
        ],
        columns: NLI_COLUMNS,
        ..glue("mnli", &PAIR, "MNLI", NLI, "accuracy", "MNLI-m.tsv")
    },
    Task {
        files: [
            "train.tsv multinli_1.0_train.jsonl",
            "dev_mismatched.tsv multinli_1.0_dev_mismatched.jsonl",
            "test_mismatched.tsv",
        ],
        columns: NLI_COLUMNS,
        ..glue("mnli-mismatched", &PAIR, "MNLI", NLI, "accuracy", "MNLI-mm.tsv")
    },
    Task {
        columns: TaskColumns { first: &["question"], second: &["sentence"], ..SENTENCES_1_2 },
        ..glue("qnli", &PAIR, "QNLI", ENTAILS, "accuracy", "QNLI.tsv")
    },
    glue("rte", &PAIR, "RTE", ENTAILS, "accuracy", "RTE.tsv"),
    Task { meanings: &["not_entailment", "entailment"], ..glue("wnli", &PAIR, "WNLI", BINARY, "accuracy", "WNLI.tsv") },
    // GLUE's diagnostics. The file that the server wants predictions for has no labels, that of the authors has.
    Task {
        files: ["", "diagnostic-full.tsv", "diagnostic.tsv AX.tsv"],
        columns: columns(
            &["sentence1", "Premise"],
            &["sentence2", "Hypothesis"],
            &["Label", "label"],
            &["index", "idx"],
        ),
        models_of: Some("mnli"),
        ..glue("ax", &PAIR, "diagnostic", NLI, "matthews", "AX.tsv")
    },
    // SuperGLUE. Texts stand in the order of jiant's; labels are written as the server takes them.
    Task {
        columns: columns(&["question"], &["passage"], &["label"], &["idx"]),
        length: Some(256),
        ..superglue("boolq", &PAIR, "BoolQ", TRUTH, "accuracy", "BoolQ.jsonl")
    },
    Task { length: Some(256), ..superglue("cb", &COMMITMENT, "CB", COMMITMENTS, "acc_and_f1", "CB.jsonl") },
    superglue("copa", &COPA, "COPA", &[], "accuracy", "COPA.jsonl"),
    Task {
        columns: NO_COLUMNS,
        length: Some(512),
        ..superglue("multirc", &JUDGE, "MultiRC", BINARY, "f1_a", "MultiRC.jsonl")
    },
    Task { columns: NO_COLUMNS, length: Some(512), ..superglue("record", &CLOZE, "ReCoRD", &[], "f1", "ReCoRD.jsonl") },
    superglue("superglue-rte", &PAIR, "RTE", ENTAILS, "accuracy", "RTE.jsonl"),
    Task { columns: SENTENCES_1_2, ..superglue("wic", &SPAN_PAIR, "WiC", TRUTH, "accuracy", "WiC.jsonl") },
    Task {
        columns: columns(&["text"], &[], &["label"], &["idx"]),
        meanings: TRUTH,
        ..superglue("wsc", &SPAN, "WSC", &["False", "True"], "accuracy", "WSC.jsonl")
    },
    Task {
        files: ["", "", "AX-b.jsonl"],
        columns: SENTENCES_1_2,
        models_of: Some("superglue-rte"),
        ..superglue("axb", &PAIR, "AX-b", ENTAILS, "matthews", "AX-b.jsonl")
    },
    Task {
        files: ["", "", "AX-g.jsonl"],
        models_of: Some("superglue-rte"),
        ..superglue("axg", &WINOGENDER, "AX-g", ENTAILS, "accuracy", "AX-g.jsonl")
    },
    Task {
        directory: "snli_1.0",
        files: [
            "snli_1.0_train.jsonl snli_1.0_train.txt train.tsv train.jsonl",
            "snli_1.0_dev.jsonl snli_1.0_dev.txt dev.tsv dev.jsonl",
            "snli_1.0_test.jsonl snli_1.0_test.txt test.tsv test.jsonl",
        ],
        labels: NLI,
        columns: NLI_COLUMNS,
        ..task("snli", &PAIR, "accuracy")
    },
    Task {
        files: ["train-v1.1.json", "dev-v1.1.json", "test-v1.1.json"],
        submission: Some("predictions.json"),
        columns: NO_COLUMNS,
        ..task("squad1", &ANSWER, "f1")
    },
    Task {
        files: ["train-v2.0.json", "dev-v2.0.json", "test-v2.0.json"],
        submission: Some("predictions.json"),
        columns: NO_COLUMNS,
        may_be_unanswerable: true,
        ..task("squad2", &ANSWER, "f1")
    },
    Task { files: SENTENCES, columns: NO_COLUMNS, ..task("ner", &ENTITIES, "f1") },
    Task { files: SENTENCES, columns: NO_COLUMNS, ..task("pos", &WORDS, "accuracy") },
    Task {
        files: ["train.csv", "val.csv", "test.csv"],
        columns: columns(&["sent1"], &["sent2"], &["label"], &[""]),
        ..task("swag", &CHOOSE, "accuracy")
    },
    task("classify", &CLASSIFY, "accuracy"),
    task("pair", &PAIR, "accuracy"),
    Task { symmetric: true, ..task("regress", &REGRESS, "pearson") },
    task("multilabel", &MULTILABEL, "f1"),
    task("span", &SPAN, "accuracy"),
    Task { files: SENTENCES, columns: NO_COLUMNS, ..task("tag", &ENTITIES, "f1") },
    Task {
        files: [
            "train.json train.jsonl train.parquet",
            "dev.json dev.jsonl validation.parquet",
            "test.json test.jsonl test.parquet",
        ],
        submission: Some("predictions.json"),
        columns: NO_COLUMNS,
        may_be_unanswerable: true,
        ..task("qa", &ANSWER, "f1")
    },
    Task {
        columns: columns(
            &["context", "question", "sent1", "premise", "text"],
            &["sent2"],
            &["label", "answer", "answerKey"],
            IDS,
        ),
        ..task("choice", &CHOOSE, "accuracy")
    },
    Task {
        columns: columns(
            &["sentence1", "anchor", "query", "text1", "question1", "premise", "sentence_A", "question", "text"],
            &[
                "sentence2",
                "positive",
                "text2",
                "question2",
                "hypothesis",
                "sentence_B",
                "answer",
                "second",
                "pos",
                "positives",
            ],
            &["score"],
            IDS,
        ),
        ..task("embed", &EMBED, "spearman")
    },
    Task {
        columns: columns(&["query", "question", "anchor", "sentence1"], &[], &[], IDS),
        ..task("rerank", &RANK, "ndcg")
    },
    Task { columns: NO_COLUMNS, ..task("seq2seq", &SEQ2SEQ, "bleu") },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_in_the_directory_or_its_own_below() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::create_dir(at("MRPC")).unwrap();
        for name in ["MRPC/dev.tsv.zst", "train.tsv", "en_x-ud-dev.conllu.gz", "a-ud-train.conllu", "b-ud-train.conllu"]
        {
            std::fs::write(at(name), "").unwrap();
        }
        let find = |name: &str, split| Task::named(name).unwrap().find(place.path(), split);
        assert_eq!(find("mrpc", Split::Dev).unwrap(), at("MRPC/dev.tsv.zst"));
        assert_eq!(find("mrpc", Split::Train).unwrap(), at("train.tsv"));
        assert_eq!(find("pos", Split::Dev).unwrap(), at("en_x-ud-dev.conllu.gz"));
        let message = find("mrpc", Split::Test).unwrap_err().to_string();
        assert!(message.contains("msr_paraphrase_test.txt") && message.contains("MRPC/"), "{message}");
        std::fs::remove_file(at("train.tsv")).unwrap();
        let message = find("pos", Split::Train).unwrap_err().to_string();
        assert!(message.contains("a-ud-train.conllu, b-ud-train.conllu"), "{message}");
    }

    #[test]
    fn names_are_unique_and_meanings_complete() {
        for (i, task) in TASKS.iter().enumerate() {
            assert!(TASKS[..i].iter().all(|other| other.name != task.name), "{}", task.name);
            assert!(task.meanings.is_empty() || task.meanings.len() == task.labels.len(), "{}", task.name);
        }
    }
}
