//! The flags that set values of a recipe, and those of `henson settings`.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, ValueEnum};
use schemars::JsonSchema;
use serde::de::value::Error;
use serde::de::{DeserializeOwned, IntoDeserializer};

/// Values of the recipe. The flags are those that people ask for most; each is the same as `--set` with its key.
#[derive(Args, Debug, Clone, Default)]
pub(crate) struct RecipeFlags {
    /// Number of epochs
    #[arg(long, value_name = "N")]
    epochs: Option<f64>,

    /// Peak learning rate
    #[arg(long, value_name = "RATE")]
    learning_rate: Option<f64>,

    /// Sequences per update
    #[arg(long, value_name = "N")]
    batch_size: Option<usize>,

    /// Set any other value of the recipe, such as dropout=0.1 or config.num_hidden_layers=6; `henson help settings` lists
    /// all keys
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl RecipeFlags {
    /// All of them as `key=value`.
    pub(crate) fn sets(&self) -> Result<Vec<String>, clap::Error> {
        let flags = [
            ("epochs", self.epochs.map(|value| value.to_string())),
            ("learning_rate", self.learning_rate.map(|value| value.to_string())),
            ("batch_size", self.batch_size.map(|value| value.to_string())),
        ];
        let mut sets = Vec::new();
        for (key, value) in flags.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            let flag = key.replace('_', "-");
            if let Some(set) = self.sets.iter().find(|set| set.split('=').next().map(str::trim) == Some(key)) {
                let problem = format!("--{flag} {value} and --set {set} set the same value: give one of them");
                return Err(super::Flags::command().error(ErrorKind::ArgumentConflict, problem));
            }
            sets.push(format!("{key}={value}"));
        }
        sets.extend_from_slice(&self.sets);
        Ok(sets)
    }
}

/// Reads a setting of recipes that has names for values, with their meanings as help. Older names are not shown.
pub(crate) fn named<T>(older: &[&'static str]) -> impl TypedValueParser<Value = T>
where
    T: JsonSchema + DeserializeOwned + Clone + Send + Sync + 'static,
{
    // Commands are described once, and as long as the program runs.
    let text = |text: String| -> &'static str { text.leak() };
    let known = henson_train::choices_of::<T>().into_iter();
    let known = known.map(|(name, meaning)| PossibleValue::new(text(name)).help(text(meaning)));
    let older = older.iter().map(|name| PossibleValue::new(*name).hide(true));
    let names = PossibleValuesParser::new(known.chain(older));
    names.try_map(|name| T::deserialize(IntoDeserializer::<Error>::into_deserializer(name)))
}

/// Whose settings.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecipeName {
    /// Those of `henson pretrain` and `ablate`
    Pretrain,
    /// Those of `henson finetune`
    Finetune,
    /// Those of `henson finetune --frozen` with --layers, --head or --crf
    Tagger,
    /// Those of `henson probe`
    Probe,
}

#[derive(Args, Debug)]
pub(crate) struct Settings {
    /// Whose settings [default: all]
    #[arg(value_enum)]
    pub(crate) recipe: Option<RecipeName>,

    /// Print one JSON object per setting
    #[arg(long, conflicts_with = "markdown")]
    pub(crate) json: bool,

    /// Print the tables of docs/recipes.md and docs/finetuning.md
    #[arg(long, hide = true)]
    pub(crate) markdown: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  henson completions bash > ~/.local/share/bash-completion/completions/henson\n  \
henson completions zsh > ~/.zfunc/_henson\n  henson completions fish > ~/.config/fish/completions/henson.fish")]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}
