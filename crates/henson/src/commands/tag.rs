//! `henson tag`.

use std::ops::Range;

use henson_infer::{Grouped, Model, TagInput, Tagged, Task, Want};
use henson_tasks::Tagger;
use henson_text::code_point_offsets;
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::flags::tasks::Tag;
use crate::{input, models, output};

/// What tags: a model with a head for it, or a tagger on a frozen encoder.
enum Opened {
    Model(Box<Model>),
    Tagger(Box<Tagger>),
}

/// What `--json` prints for a text.
#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    entities: Vec<Span<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    words: Option<Vec<Span<'a>>>,
    dropped: usize,
}

/// A part of the text; offsets are in characters.
#[derive(Serialize)]
struct Span<'a> {
    start: usize,
    end: usize,
    text: &'a str,
    /// Null for a word that was cut off.
    label: Option<&'a str>,
    score: f32,
}

pub(crate) fn run(flags: &Tag) -> anyhow::Result<()> {
    let device = flags.ask.compute.device()?;
    let path = models::find(&flags.ask.model, BuiltIn::General)?;
    let opened = match Tagger::is_in(&path) {
        true => Opened::Tagger(Box::new(Tagger::open(&path, &device, flags.ask.compute.dtype())?)),
        false => {
            Opened::Model(Box::new(Model::open(&path, &device, flags.ask.compute.dtype(), Want::Task(Task::Tag))?))
        }
    };
    let labels = match &opened {
        Opened::Model(model) => {
            output::warn_of_length(flags.ask.length.max_length, model.most_tokens());
            model.labels()
        }
        Opened::Tagger(tagger) => tagger.labels().to_vec(),
    };
    input::for_each(&flags.ask.texts, |texts, numbers| {
        let split: Vec<Vec<&str>> = if flags.pre_tokenized {
            texts.iter().map(|text| text.split_whitespace().collect()).collect()
        } else {
            Vec::new()
        };
        let inputs: Vec<TagInput<'_>> = if flags.pre_tokenized {
            split.iter().map(|words| TagInput::Words(words)).collect()
        } else {
            texts.iter().map(|text| TagInput::Text(text)).collect()
        };
        if let Some(aggregation) = flags.aggregation {
            let Opened::Model(model) = &opened else {
                anyhow::bail!("--aggregation: {} is a tagger on a frozen encoder, which tags words", path.display());
            };
            let grouped = model.tag_groups(&inputs, aggregation, flags.ask.length.of_task(model));
            let grouped = grouped.map_err(|error| error.numbered(numbers))?;
            output::warn_cut(numbers, grouped.iter().map(|g| g.dropped));
            return grouped.iter().try_for_each(|grouped| {
                let line = grouped_line(grouped);
                if flags.ask.json { output::json(&line) } else { print(&line) }
            });
        }
        let tagged = match &opened {
            Opened::Model(model) => {
                let tagged = model.tag(&inputs, flags.ask.length.of_task(model));
                tagged.map_err(|error| error.numbered(numbers))?
            }
            // It always reads by windows.
            Opened::Tagger(tagger) => {
                let tagged = tagger.tag(&inputs, flags.ask.length.max_length);
                tagged.map_err(|error| error.numbered(numbers))?
            }
        };
        output::warn_cut(numbers, tagged.iter().map(|t| t.dropped));
        tagged.iter().try_for_each(|tagged| {
            let line = line(tagged, &labels, flags.each_word);
            if flags.ask.json { output::json(&line) } else { print(&line) }
        })
    })
}

fn line<'a>(tagged: &'a Tagged, labels: &'a [String], each_word: bool) -> Line<'a> {
    let text = tagged.text.as_str();
    let entities = tagged.entities.iter().map(|e| (e.place.clone(), Some(e.label.as_str()), e.score));
    let words = tagged.words.iter().map(|word| {
        let label = word.label.and_then(|label| labels.get(label)).map(String::as_str);
        (word.place.clone(), label, word.score)
    });
    Line {
        text,
        entities: spans(text, entities.collect()),
        words: each_word.then(|| spans(text, words.collect())),
        dropped: tagged.dropped,
    }
}

fn grouped_line(grouped: &Grouped) -> Line<'_> {
    let parts = grouped.groups.iter().map(|group| (group.place.clone(), Some(group.label.as_str()), group.score));
    Line { text: &grouped.text, entities: spans(&grouped.text, parts.collect()), words: None, dropped: grouped.dropped }
}

fn spans<'a>(text: &'a str, parts: Vec<(Range<usize>, Option<&'a str>, f32)>) -> Vec<Span<'a>> {
    let bytes: Vec<(usize, usize)> = parts.iter().map(|(place, ..)| (place.start, place.end)).collect();
    let offsets = code_point_offsets(text, &bytes);
    let part = |((place, label, score), (start, end))| Span { start, end, text: &text[place], label, score };
    parts.into_iter().zip(offsets).map(part).collect()
}

fn print(line: &Line<'_>) -> anyhow::Result<()> {
    output::line(line.text)?;
    for span in line.words.as_ref().unwrap_or(&line.entities) {
        let label = span.label.unwrap_or("(cut off)");
        output::line(&format!("    {:>6.2}%  {label:<10} {}", 100.0 * span.score, span.text))?;
    }
    Ok(())
}
