//! The encoder of BERT and of those relatives that differ from it in names alone, in where positions begin, and in whether there
//! are segments: embeddings with LayerNorm, then post-norm blocks.
//!
//! Legend: T tokens in the flat batch, H hidden, P rows.

use henson_tensor::{Builder, EmbeddingTables, Group, Init, Norm, Param, Parameters, Pass, Result, Tensor, Var};

use crate::layers::{BLOCK_SITES, Block, BlockNames, BlockSettings, layer_norm};
use crate::{Batch, Capture, Encoded, Network};

/// The first dropout site: the embeddings'. Those of the blocks follow.
const EMBEDDING_SITE: u32 = 0;

/// What an encoder is built with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncoderSettings {
    pub(crate) vocabulary: usize,
    /// Rows of the table of positions.
    pub(crate) positions: usize,
    /// The row of a sequence's first token there.
    pub(crate) first_position: usize,
    /// Rows of the table of segments; without it there are none.
    pub(crate) segments: Option<usize>,
    pub(crate) layers: usize,
    /// What stands before a layer's number in its name, such as `encoder.layer`.
    pub(crate) layer_name: &'static str,
    pub(crate) names: BlockNames,
    pub(crate) block: BlockSettings,
}

/// Views into the parameters.
#[derive(Debug)]
pub(crate) struct PostNormEncoder {
    tables: EmbeddingTables,
    norm: Norm,
    dropout: f32,
    layers: Vec<Block>,
}

impl PostNormEncoder {
    pub(crate) fn build(b: &mut Builder, settings: &EncoderSettings) -> Self {
        let EncoderSettings { vocabulary, positions, first_position, segments, block, .. } = *settings;
        let (h, init) = (block.hidden, block.init);
        let (tables, norm) = b.group(Group::Embeddings, |b| {
            b.at("embeddings", |b| {
                let word = b.padded_table("word_embeddings.weight", vocabulary, h, init);
                let position = Some(b.matrix("position_embeddings.weight", positions, h, init));
                let segment = segments.map(|rows| b.matrix("token_type_embeddings.weight", rows, h, init));
                (
                    EmbeddingTables { word, position, position_offset: first_position, segment },
                    layer_norm(b, "LayerNorm", h, block.epsilon),
                )
            })
        });
        let layer = |i: usize| {
            let (name, site) = (format!("{}.{i}", settings.layer_name), EMBEDDING_SITE + 1 + BLOCK_SITES * i as u32);
            b.group(Group::Layer(i), |b| b.at(&name, |b| Block::build(b, &settings.names, block, site)))
        };
        Self { tables, norm, dropout: block.dropout, layers: (0..settings.layers).map(layer).collect() }
    }

    /// The embeddings' output: T×H.
    fn embed(&self, pass: &mut Pass<'_>, batch: &Batch) -> Result<Var> {
        let segments = self.tables.segment.map(|_| &batch.segments);
        let dropout = (self.dropout, EMBEDDING_SITE);
        pass.embeddings_norm(self.tables, &batch.ids, segments, &batch.layout, &self.norm, dropout)
    }
}

impl Network for PostNormEncoder {
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        let layout = &batch.layout;
        let mut x = self.embed(pass, batch)?;
        let (mut hidden_states, mut attention_maps) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            let (next, maps) = layer.forward(pass, &x, layout, capture.attention_maps)?;
            attention_maps.extend(maps);
            let before = std::mem::replace(&mut x, next);
            if capture.hidden_states {
                hidden_states.push(before);
            }
        }
        if capture.hidden_states {
            hidden_states.push(x.clone());
        }
        Ok(Encoded { last: x, hidden_states, attention_maps })
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        let mut x = self.embed(pass, batch)?;
        let Some((last, layers)) = self.layers.split_last() else { return pass.gather(&x, rows) };
        for layer in layers {
            x = layer.forward(pass, &x, &batch.layout, false)?.0;
        }
        last.forward_rows(pass, &x, &batch.layout, rows)
    }

    fn average_in_last_layer(&self, parameters: &mut Parameters) -> Result<()> {
        self.layers.last().map_or(Ok(()), |layer| layer.average(parameters))
    }

    fn word_table(&self) -> Param {
        self.tables.word
    }
}

/// How the encoder and what is pre-trained on it start, and how a task's head does.
///
/// What is pre-trained starts as in Devlin et al. (2019). Task heads start as those of `transformers`, a seventh larger without
/// the truncation: where a task has few updates, a smaller head costs points (docs/finetuning.md).
pub(crate) fn initial_weights(initializer_range: f64) -> (Init, Init) {
    (Init::TruncatedNormal(initializer_range as f32), Init::Normal(initializer_range as f32))
}
