//! `henson data show`: instances for people.

use std::io::{self, IsTerminal};

use henson_data::{Corpus, Instance, Objective};
use serde::Serialize;

use super::{all_cores, instances};
use crate::flags::data::DataShow;
use crate::output::{self, thousands};

/// What `--json` prints for an instance.
#[derive(Serialize)]
struct Line<'a> {
    epoch: u64,
    index: u64,
    /// How many instances the epoch has.
    count: u64,
    document: usize,
    random_document: Option<usize>,
    /// 0 where the second segment followed the first, 1 where it is a random one.
    next_sentence: Option<u32>,
    pieces: Vec<String>,
    ids: &'a [u32],
    segments: &'a [u32],
    predicted: Vec<Hidden>,
    /// Where tokens are predicted in an order: 0 for those that all see, otherwise those with higher numbers do.
    #[serde(skip_serializing_if = "Option::is_none")]
    orders: Option<&'a [u32]>,
    /// What an encoder-decoder is to write.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<Target<'a>>,
}

/// What an encoder-decoder is to write.
#[derive(Serialize)]
struct Target<'a> {
    pieces: Vec<String>,
    ids: &'a [u32],
}

/// A piece that is to be predicted.
#[derive(Serialize)]
struct Hidden {
    position: u32,
    piece: String,
    id: u32,
    /// What stands in its place; of a causal instance nothing is hidden.
    #[serde(skip_serializing_if = "Option::is_none")]
    shown: Option<Shown>,
}

#[derive(Serialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Shown {
    Mask,
    Random,
    Same,
}

pub(crate) fn run(flags: &DataShow) -> anyhow::Result<()> {
    let (instances, tokenizer) = instances(&flags.data, &flags.instances)?;
    let corpus = instances.corpus();
    let epoch = instances.epoch(flags.epoch, all_cores())?;
    anyhow::ensure!(
        flags.index < epoch.count(),
        "there is no instance {}: epoch {} has {}, from 0 on",
        flags.index,
        flags.epoch,
        epoch.count()
    );
    let piece = |id: u32| tokenizer.token(id).unwrap_or_else(|| format!("<{id}>"));
    let causal = instances.settings().objective == Objective::Causal;
    let unmasked = !instances.settings().objective.masks();
    // https://no-color.org: any value but an empty one.
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colour = io::stdout().is_terminal() && !unwanted;
    for index in flags.index..epoch.count().min(flags.index.saturating_add(flags.count as u64)) {
        let instance = if flags.in_order { epoch.in_order(index) } else { epoch.get(index) }?;
        let shown = |position: usize, target| (!unmasked).then(|| shown(&instance, corpus, position, target));
        if flags.json {
            let predicted = instance.predicted.iter().map(|p| Hidden {
                position: p.position,
                piece: piece(p.target),
                id: p.target,
                shown: shown(p.position as usize, p.target),
            });
            output::json(&Line {
                epoch: flags.epoch,
                index,
                count: epoch.count(),
                document: instance.document,
                random_document: instance.random_document,
                next_sentence: instance.next_sentence,
                pieces: instance.ids.iter().map(|id| piece(*id)).collect(),
                ids: &instance.ids,
                segments: &instance.segments,
                predicted: predicted.collect(),
                target: instance
                    .target
                    .as_ref()
                    .map(|ids| Target { pieces: ids.iter().map(|id| piece(*id)).collect(), ids }),
                orders: instance.orders.as_deref(),
            })?;
            continue;
        }
        let place = format!("instance {} of {} in epoch {}", thousands(index), thousands(epoch.count()), flags.epoch);
        output::line(&format!("{place}: {}", summary(&instance, causal)))?;
        let paint = |text: &str, code: Option<&str>| {
            let text = output::harmless(text);
            match code {
                Some(code) if colour => format!("\x1b[{code}m{text}\x1b[0m"),
                _ => text.into_owned(),
            }
        };
        let special = |id: &u32| corpus.vocabulary().special.binary_search(id).is_ok().then_some("2");
        if let Some(target) = &instance.target {
            for (name, ids) in [("source", &instance.ids), ("target", target)] {
                let pieces: Vec<String> = ids.iter().map(|id| paint(&piece(*id), special(id))).collect();
                output::line_with_colours(&format!("  {name} {}", pieces.join(" ")))?;
            }
            output::line("")?;
            continue;
        }
        let mut segments = [String::from("  A"), String::from("  B")];
        let mut predicted = instance.predicted.iter().filter(|_| !causal).peekable();
        for (position, id) in instance.ids.iter().enumerate() {
            let hidden = predicted.next_if(|p| p.position as usize == position);
            let order = hidden.and_then(|p| Some((p, instance.orders.as_ref()?[position])));
            let (text, code) = match hidden.and_then(|p| Some((shown(position, p.target)?, piece(p.target)))) {
                Some((Shown::Mask, target)) => (format!("[MASK←{target}]"), Some("33")),
                Some((Shown::Random, target)) => (format!("{}←{target}", piece(*id)), Some("31")),
                Some((Shown::Same, target)) => (format!("={target}"), Some("32")),
                None if let Some((p, order)) = order => (format!("{}@{order}", piece(p.target)), Some("33")),
                None => (piece(*id), special(id)),
            };
            let segment = &mut segments[(instance.segments[position] as usize).min(1)];
            segment.push(' ');
            segment.push_str(&paint(&text, code));
        }
        // Templates with one segment have both texts in it.
        let used = if instance.segments.iter().any(|segment| *segment > 0) { 2 } else { 1 };
        segments[..used].iter().try_for_each(|segment| output::line_with_colours(segment))?;
        output::line("")?;
    }
    Ok(())
}

/// What stands where a piece is to be predicted. A random piece that happens to be the right one counts as kept.
fn shown(instance: &Instance, corpus: &Corpus, position: usize, target: u32) -> Shown {
    match instance.ids[position] {
        id if Some(id) == corpus.vocabulary().mask => Shown::Mask,
        id if id == target => Shown::Same,
        _ => Shown::Random,
    }
}

fn summary(instance: &Instance, causal: bool) -> String {
    let length = instance.ids.len();
    let count = instance.predicted.len();
    let hidden = match (&instance.target, &instance.orders) {
        (Some(target), _) => format!("{} to write", target.len()),
        (None, Some(_)) => format!("{count} predicted, in the order of the numbers"),
        (None, None) if causal => "each predicts the next".to_owned(),
        (None, None) => format!("{count} masked"),
    };
    let origin = match (instance.next_sentence, instance.random_document) {
        (Some(_), Some(other)) => format!("A from document {}, B a random part of document {other}", instance.document),
        (Some(0), None) => format!("document {}, B follows A", instance.document),
        (Some(_), None) => format!("document {}, A follows B", instance.document),
        (None, _) => format!("document {}", instance.document),
    };
    format!("{length} tokens, {hidden}; {origin}")
}
