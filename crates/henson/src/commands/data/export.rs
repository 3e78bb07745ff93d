//! `henson data export`: the first batches of pre-training for other systems, padded as they want them.

use std::path::Path;

use anyhow::Context;
use henson_checkpoint::write_atomic;
use henson_data::{Loader, Objective, Part, Place};
use serde_json::{Map, Value, json};

use super::{all_cores, instances};
use crate::flags::data::DataExport;
use crate::output::{self, thousands};

/// The label of a piece that is not to be predicted, in transformers.
const IGNORED: i64 = -100;

pub(crate) fn run(flags: &DataExport) -> anyhow::Result<()> {
    let out = &flags.out;
    anyhow::ensure!(flags.overwrite || !out.exists(), "{} exists: --overwrite replaces it", out.display());
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    anyhow::ensure!(parent.is_dir(), "cannot write {}: there is no directory {}", out.display(), parent.display());

    let (instances, tokenizer) = instances(&flags.data, &flags.instances)?;
    let objective = instances.settings().objective;
    let padding = tokenizer.special().pad.as_ref().map_or(0, |padding| padding.id);
    let mut file = File { padding: padding.into(), header: Map::new(), data: Vec::new() };
    let (mut pieces, mut predicted) = (0, 0);
    let mut loader = Loader::new(instances.clone(), Place::default(), flags.batch_size, 1, all_cores(), 4)?;
    let digits = (flags.batches - 1).to_string().len().max(4);
    for number in 0..flags.batches {
        let step = loader.next()?;
        pieces += step.tokens;
        predicted += step.predicted;
        for part in &step.parts {
            file.add(&format!("batch.{number:0digits$}"), part, objective);
        }
    }
    let metadata = json!({
        "format": "pt",
        "corpus": instances.corpus().digest(),
        "settings": serde_json::to_string(instances.settings())?,
        "seed": flags.instances.seed.to_string(),
    });
    write_atomic(out, &file.bytes(metadata)?).with_context(|| format!("cannot write {}", out.display()))?;
    output::line(&format!(
        "wrote {} × {} sequences to {}: {} tokens, {} to predict",
        flags.batches,
        flags.batch_size,
        out.display(),
        thousands(pieces as u64),
        thousands(predicted as u64)
    ))
}

/// A file of the safetensors format in the making: all tensors are of 64-bit integers.
struct File {
    /// What fills up short sequences.
    padding: i64,
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl File {
    /// Adds a batch, padded to its longest sequence.
    fn add(&mut self, name: &str, part: &Part, objective: Objective) {
        let rows = part.lengths.len();
        let columns = part.lengths.iter().copied().max().unwrap_or(0);
        let filled = |value: i64| vec![value; rows * columns];
        let (mut ids, mut segments, mut mask) = (filled(self.padding), filled(0), filled(0));
        let mut labels = filled(IGNORED);
        // Where each piece of the stream stands in the table.
        let mut places = Vec::with_capacity(part.ids.len());
        for (row, length) in part.lengths.iter().enumerate() {
            places.extend(row * columns..row * columns + length);
        }
        for (piece, place) in places.iter().enumerate() {
            ids[*place] = i64::from(part.ids[piece]);
            segments[*place] = i64::from(part.segments[piece]);
            mask[*place] = 1;
        }
        for (row, target) in part.rows.iter().zip(&part.targets).filter(|_| part.target_lengths.is_none()) {
            // In transformers a causal model moves its labels by itself: they stand where the piece is that is predicted.
            let place = places[*row as usize] + usize::from(objective == Objective::Causal);
            labels[place] = i64::from(*target);
        }
        let mut label_columns = columns;
        if let Some(lengths) = &part.target_lengths {
            label_columns = lengths.iter().copied().max().unwrap_or(0);
            labels = vec![IGNORED; rows * label_columns];
            let mut rest = part.targets.iter();
            for (row, length) in labels.chunks_mut(label_columns.max(1)).zip(lengths) {
                row[..*length].iter_mut().zip(&mut rest).for_each(|(label, target)| *label = i64::from(*target));
            }
        }
        let shape = [rows, columns];
        self.push(format!("{name}.input_ids"), &shape, &ids);
        self.push(format!("{name}.token_type_ids"), &shape, &segments);
        self.push(format!("{name}.attention_mask"), &shape, &mask);
        match &part.orders {
            None => self.push(format!("{name}.labels"), &[rows, label_columns], &labels),
            Some(orders) => self.add_orders(name, part, orders, columns),
        }
        if let Some(next) = &part.next_sentence {
            let next: Vec<i64> = next.iter().copied().map(i64::from).collect();
            let label = if objective == Objective::MlmSop { "sentence_order_label" } else { "next_sentence_label" };
            self.push(format!("{name}.{label}"), &[rows], &next);
        }
    }

    /// What `transformers` takes for tokens that are predicted in an order: which token does not see which, where those stand that are
    /// predicted, and what they are. Short lists are filled up with tokens nowhere, whose labels do not count.
    fn add_orders(&mut self, name: &str, part: &Part, orders: &[u32], columns: usize) {
        let (mut start, rows) = (0, part.lengths.len());
        let mut predicted: Vec<Vec<(usize, i64)>> = vec![Vec::new(); rows];
        let mut hidden = vec![0; rows * columns * columns];
        let mut rest = part.rows.iter().zip(&part.targets).peekable();
        for (row, length) in part.lengths.iter().enumerate() {
            let own = &orders[start..start + length];
            for (i, j) in (0..length * length).map(|pair| (pair / length, pair % length)) {
                hidden[(row * columns + i) * columns + j] = i64::from(own[j] >= own[i].max(1));
            }
            while let Some((at, target)) = rest.next_if(|(at, _)| (**at as usize) < start + length) {
                predicted[row].push((*at as usize - start, i64::from(*target)));
            }
            start += length;
        }
        let most = predicted.iter().map(Vec::len).max().unwrap_or(0);
        let (mut mapping, mut labels) = (vec![0; rows * most * columns], vec![IGNORED; rows * most]);
        for (row, predicted) in predicted.iter().enumerate() {
            for (i, (at, target)) in predicted.iter().enumerate() {
                mapping[(row * most + i) * columns + at] = 1;
                labels[row * most + i] = *target;
            }
        }
        self.push(format!("{name}.perm_mask"), &[rows, columns, columns], &hidden);
        self.push(format!("{name}.target_mapping"), &[rows, most, columns], &mapping);
        self.push(format!("{name}.labels"), &[rows, most], &labels);
    }

    fn push(&mut self, name: String, shape: &[usize], values: &[i64]) {
        let start = self.data.len();
        self.data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let offsets = [start, self.data.len()];
        self.header.insert(name, json!({"dtype": "I64", "shape": shape, "data_offsets": offsets}));
    }

    fn bytes(mut self, metadata: Value) -> anyhow::Result<Vec<u8>> {
        self.header.insert("__metadata__".to_owned(), metadata);
        let mut header = serde_json::to_vec(&self.header)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.append(&mut self.data);
        Ok(bytes)
    }
}
