//! `henson settings` and `henson help settings`: every key of every recipe.

use std::fmt::Write;

use henson_tasks::{FineTuneRecipe, ProbeRecipe, TaggerRecipe};
use henson_train::{Recipe, Setting, settings};
use serde::Serialize;

use crate::flags::settings::{RecipeName, Settings};
use crate::output;

/// What `--json` prints for a setting.
#[derive(Serialize)]
struct Line {
    recipe: &'static str,
    #[serde(flatten)]
    setting: Setting,
}

/// The settings of a recipe.
struct Group {
    recipe: RecipeName,
    name: &'static str,
    title: &'static str,
    settings: Vec<Setting>,
}

pub(crate) fn run(flags: &Settings) -> anyhow::Result<()> {
    let wanted = |group: &Group| flags.recipe.is_none_or(|recipe| recipe == group.recipe);
    for group in groups().into_iter().filter(wanted) {
        if flags.json {
            let line = |setting| output::json(&Line { recipe: group.name, setting });
            group.settings.into_iter().try_for_each(line)?;
        } else if flags.markdown {
            output::line(markdown(&group).trim_end())?;
        } else {
            output::line(&text(&group))?;
        }
    }
    Ok(())
}

/// All settings, for the help.
pub(crate) fn help() -> String {
    groups().iter().map(text).collect::<Vec<_>>().join("\n")
}

fn groups() -> [Group; 4] {
    [
        Group {
            recipe: RecipeName::Pretrain,
            name: "pretrain",
            title: "henson pretrain, henson ablate",
            settings: settings::<Recipe>(),
        },
        Group {
            recipe: RecipeName::Finetune,
            name: "finetune",
            title: "henson finetune",
            settings: FineTuneRecipe::settings(),
        },
        Group {
            recipe: RecipeName::Tagger,
            name: "tagger",
            title: "henson finetune --frozen with --layers, --head or --crf",
            settings: settings::<TaggerRecipe>(),
        },
        Group { recipe: RecipeName::Probe, name: "probe", title: "henson probe", settings: settings::<ProbeRecipe>() },
    ]
}

/// Lines for people.
fn text(group: &Group) -> String {
    let mut text = format!("Settings of {}:\n", group.title);
    for setting in &group.settings {
        let default = setting.default.as_ref().map_or(String::new(), |default| format!(" = {default}"));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}{default}\n      {}", setting.key, setting.meaning);
        for (name, meaning) in &setting.choices {
            let _ = writeln!(text, "        {name:<20} {meaning}");
        }
    }
    text
}

/// A table of a document.
fn markdown(group: &Group) -> String {
    let mut text = String::from("| key | default | meaning |\n|---|---|---|\n");
    for setting in &group.settings {
        let default = setting.default.as_ref().map_or(String::new(), |default| format!("`{default}`"));
        let each = setting.choices.iter().map(|(name, meaning)| match meaning.as_str() {
            "" => format!("`{name}`"),
            meaning => format!("`{name}`: {}", meaning.trim_end_matches('.')),
        });
        let choices = each.collect::<Vec<_>>().join("; ");
        let meaning = format!("{} {choices}", setting.meaning);
        let _ = writeln!(text, "| `{}` | {default} | {} |", setting.key, meaning.trim().replace('|', "\\|"));
    }
    text
}
