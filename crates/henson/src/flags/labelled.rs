//! Flags for labelled files, which `eval` has and other commands on tasks share.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use henson_data::tables::{Column, TableFormat};
use henson_tasks::{Files, TASKS};

/// How a labelled file is read, where it is not as the task's own files are; for a model, as the files of its training.
#[derive(Args, Debug, Clone, Default, PartialEq)]
#[command(next_help_heading = "Labelled files")]
pub(crate) struct Labelled {
    /// File format of the table [default: from its name]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<FormatName>,

    /// Whether cells may be quoted [default: in csv]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) quotes: Option<bool>,

    /// Whether the first row names the columns [default: yes, or as the task has it]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) header: Option<bool>,

    /// The column with the text, the first of two, the question, the context, the words or the source: its name or number, from 0
    #[arg(long, visible_alias = "source-column", value_name = "COLUMN", value_parser = parse_column)]
    pub(crate) text_column: Option<Column>,

    /// The column with the second text, or the passage
    #[arg(long, value_name = "COLUMN", value_parser = parse_column)]
    pub(crate) second_column: Option<Column>,

    /// The column with the label, number, answer, tags or target. Several: for multilabel, each is 0 or 1; for seq2seq, each is a
    /// reference
    #[arg(long, visible_alias = "target-column", value_name = "COLUMN,…", value_parser = parse_column, value_delimiter = ',')]
    pub(crate) label_column: Vec<Column>,

    /// The columns with the choices, or the one with a list of them
    #[arg(long, value_name = "COLUMN,…", value_parser = parse_column, value_delimiter = ',')]
    pub(crate) choice_columns: Vec<Column>,

    /// embed: the column with a hard negative [default: negative, where there is one]
    #[arg(long, value_name = "COLUMN", value_parser = parse_column)]
    pub(crate) negative_column: Option<Column>,

    /// The column with the ids of predictions [default: index, id, …, otherwise the row number from 0]
    #[arg(long, value_name = "COLUMN", value_parser = parse_column)]
    pub(crate) id_column: Option<Column>,

    /// The labels, in the order of their ids [default: the official ones, otherwise those of the file, sorted]
    #[arg(long, value_name = "LABEL,…", value_delimiter = ',')]
    pub(crate) labels: Vec<String>,

    /// Skip and count malformed rows instead of stopping at the first
    #[arg(long)]
    pub(crate) skip_bad: bool,
}

impl Labelled {
    /// The same, as recipes have it.
    pub(crate) fn files(&self) -> Files {
        Files {
            text_column: self.text_column.clone(),
            second_column: self.second_column.clone(),
            label_column: self.label_column.clone(),
            id_column: self.id_column.clone(),
            choice_columns: self.choice_columns.clone(),
            negative_column: self.negative_column.clone(),
            format: self.format.map(|format| match format {
                FormatName::Tsv => TableFormat::Tsv,
                FormatName::Csv => TableFormat::Csv,
                FormatName::Jsonl => TableFormat::JsonLines,
                FormatName::Fasttext => TableFormat::FastText,
                FormatName::Parquet => TableFormat::Parquet,
            }),
            quotes: self.quotes,
            header: self.header,
            labels: self.labels.clone(),
            skip_bad: self.skip_bad,
        }
    }
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FormatName {
    /// Cells between tabs; quotes are ordinary characters
    Tsv,
    /// Cells between commas, with quotes
    Csv,
    /// One JSON object per line, or one array of objects
    Jsonl,
    /// fastText's lines: __label__x, once or several times, then the text
    Fasttext,
    /// Parquet
    Parquet,
}

fn parse_column(text: &str) -> Result<Column, String> {
    match text.parse() {
        Ok(number) => Ok(Column::Number(number)),
        Err(_) if text.is_empty() => Err("expected the name or the number of a column".to_owned()),
        Err(_) => Ok(Column::Name(text.to_owned())),
    }
}

/// The names of tasks, and `more` that only one command has.
pub(crate) fn task_names(more: &[&'static str]) -> impl TypedValueParser<Value = String> + use<> {
    PossibleValuesParser::new(more.iter().copied().chain(TASKS.iter().map(|task| task.name)).collect::<Vec<_>>())
}
