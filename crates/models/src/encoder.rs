//! The encoder of BERT and of its nearest relatives: embeddings with LayerNorm, then post-norm blocks. They differ in names, in
//! where positions begin, in whether there are segments, in the width of the tables, in how attention sees distances, and in
//! whether layers share their weights.
//!
//! Legend: T tokens in the flat batch, H hidden, P rows.

use henson_tensor::{
    Activation, Buckets, Builder, EmbeddingTables, Group, Init, Norm, Param, Parameters, Pass, RelativePositions,
    Result, Tensor, TensorError, Var,
};

use crate::layers::{
    BLOCK_SITES, Block, BlockNames, BlockSettings, Context, Distances, Linear, PositionScores, layer_norm,
};
use crate::{Batch, Capture, Encoded, Network};

/// The first dropout site: the embeddings'. Those of the blocks follow.
const EMBEDDING_SITE: u32 = 0;

/// The first dropout site of an encoder on lent tables, beyond those of the lender and before those of heads.
const LENT_SITES: u32 = 0x8000;

/// What an encoder is built with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncoderSettings {
    pub(crate) vocabulary: usize,
    /// Rows of the table of positions; 0 where there is none.
    pub(crate) positions: usize,
    /// The row of a sequence's first token there.
    pub(crate) first_position: usize,
    /// Rows of the table of segments; without it there are none.
    pub(crate) segments: Option<usize>,
    /// The tables' columns and the name of the layer that brings them to H, where they have a width of their own.
    pub(crate) projection: Option<(usize, &'static str)>,
    pub(crate) embedding_dropout: f32,
    pub(crate) layers: usize,
    /// What stands before and behind a layer's number in its name, such as `encoder.layer.` and nothing.
    pub(crate) layer_name: [&'static str; 2],
    /// How many layers have weights of their own, where others use theirs again.
    pub(crate) layer_groups: Option<usize>,
    pub(crate) names: BlockNames,
    pub(crate) block: BlockSettings,
    /// The name of the table of biases by distance, one for all layers, and how distances become rows of it.
    pub(crate) relative_bias: Option<(&'static str, Buckets)>,
    /// The table of relative positions, one for all layers.
    pub(crate) relative_table: Option<RelativeTable>,
}

impl EncoderSettings {
    /// One with positions, without segments, and with blocks under BERT's name.
    pub(crate) fn new([vocabulary, positions, layers]: [usize; 3], names: BlockNames, block: BlockSettings) -> Self {
        Self {
            vocabulary,
            positions,
            first_position: 0,
            segments: None,
            projection: None,
            embedding_dropout: block.dropout,
            layers,
            layer_name: ["encoder.layer.", ""],
            layer_groups: None,
            names,
            block,
            relative_bias: None,
            relative_table: None,
        }
    }
}

/// DeBERTa's table of relative positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RelativeTable {
    pub(crate) name: &'static str,
    pub(crate) rows: usize,
    /// The norm's name, where there is one.
    pub(crate) norm: Option<&'static str>,
    pub(crate) scores: PositionScores,
}

/// Views into the parameters.
#[derive(Clone, Debug)]
pub(crate) struct PostNormEncoder {
    tables: EmbeddingTables,
    norm: Norm,
    dropout: f32,
    projection: Option<Linear>,
    layers: Vec<Block>,
    /// Whether layers share weights.
    shared: bool,
    /// The first of its dropout sites.
    site: u32,
    /// Relative positions, and their norm.
    relative: Option<(Param, Option<Norm>)>,
}

impl PostNormEncoder {
    pub(crate) fn build(b: &mut Builder, settings: &EncoderSettings) -> Self {
        Self::build_on(b, settings, None)
    }

    /// Builds one that stands on the tables of another and their LayerNorm, which are of the same width, where that is given. The
    /// two then run in one pass, so its dropout has sites of its own.
    pub(crate) fn build_on(b: &mut Builder, settings: &EncoderSettings, lender: Option<&Self>) -> Self {
        let EncoderSettings { vocabulary, positions, first_position, segments, projection, block, .. } = *settings;
        let (h, init) = (block.hidden, block.init);
        let width = projection.map_or(h, |(width, _)| width);
        let (tables, norm, projection) = b.group(Group::Embeddings, |b| {
            let lent = lender.map(|lender| (lender.tables, lender.norm));
            let (tables, norm) = lent.unwrap_or_else(|| {
                b.at("embeddings", |b| {
                    let word = b.padded_table("word_embeddings.weight", vocabulary, width, init);
                    let mut table = |rows: usize| b.matrix("position_embeddings.weight", rows, width, init);
                    let position = (positions > 0).then(|| table(positions));
                    let segment = segments.map(|rows| b.matrix("token_type_embeddings.weight", rows, width, init));
                    let norm = layer_norm(b, "LayerNorm", width, block.epsilon);
                    (EmbeddingTables { word, position, position_offset: first_position, segment }, norm)
                })
            });
            (tables, norm, projection.map(|(width, name)| Linear::build(b, name, width, h, init)))
        });
        // A part of all layers: it is trained at the first one's rate.
        let bias = settings.relative_bias.map(|(name, buckets)| {
            let rows = buckets.count as usize;
            Distances::Bias(b.group(Group::Layer(0), |b| b.matrix(name, rows, block.heads, init)), buckets)
        });
        let relative = settings.relative_table.map(|RelativeTable { name, rows, norm, .. }| {
            b.group(Group::Layer(0), |b| {
                (b.matrix(name, rows, h, init), norm.map(|norm| layer_norm(b, norm, h, block.epsilon)))
            })
        });
        let scores = settings.relative_table.map(|table| Distances::Scores(table.scores));
        let distances = bias.or(scores).unwrap_or(Distances::None);
        let own = settings.layer_groups.unwrap_or(settings.layers);
        let [before, behind] = settings.layer_name;
        let layer = |i: usize| {
            let name = format!("{before}{i}{behind}");
            b.group(Group::Layer(i), |b| b.at(&name, |b| Block::build(b, &settings.names, block, distances)))
        };
        let own: Vec<Block> = (0..own).map(layer).collect();
        let first_site = if lender.is_some() { LENT_SITES } else { EMBEDDING_SITE };
        let site = |i: usize| first_site + 1 + BLOCK_SITES * i as u32;
        let layers = (0..settings.layers).map(|i| own[i * own.len() / settings.layers].at_site(site(i))).collect();
        let (dropout, shared) = (settings.embedding_dropout, settings.layer_groups.is_some());
        Self { tables, norm, dropout, projection, layers, shared, site: first_site, relative }
    }

    /// The embeddings' output: T×H.
    fn embed(&self, pass: &mut Pass<'_>, batch: &Batch) -> Result<Var> {
        let segments = self.tables.segment.map(|_| &batch.segments);
        let dropout = (self.dropout, self.site);
        let x = pass.embeddings_norm(self.tables, &batch.ids, segments, &batch.layout, &self.norm, dropout)?;
        self.projection.map_or(Ok(x.clone()), |projection| projection.forward(pass, &x, Activation::None))
    }

    /// What blocks read besides the hidden states.
    fn context<'a>(&self, pass: &mut Pass<'_>, batch: &'a Batch) -> Result<Context<'a>> {
        let relative = match (self.relative, &batch.relative) {
            (Some((table, norm)), Some(positions)) => Some((normed_rows(pass, table, norm, positions)?, positions)),
            (None, None) => None,
            _ => {
                let why = "the batch was made for another family of models";
                return Err(TensorError::Unsupported { operation: "encode", why });
            }
        };
        Ok(Context { layout: &batch.layout, relative })
    }
}

impl Network for PostNormEncoder {
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        let mut x = self.embed(pass, batch)?;
        let context = self.context(pass, batch)?;
        let (mut hidden_states, mut attention_maps) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            let (next, maps) = layer.forward(pass, &x, &context, capture.attention_maps)?;
            attention_maps.extend(maps);
            let before = std::mem::replace(&mut x, next);
            if capture.hidden_states {
                hidden_states.push(before);
            }
        }
        if capture.hidden_states {
            hidden_states.push(x.clone());
        }
        Ok(Encoded { last: x, hidden_states, attention_maps, states: Vec::new() })
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        let mut x = self.embed(pass, batch)?;
        let Some((last, layers)) = self.layers.split_last() else { return pass.gather(&x, rows) };
        let context = self.context(pass, batch)?;
        for layer in layers {
            x = layer.forward(pass, &x, &context, false)?.0;
        }
        last.forward_rows(pass, &x, &context, rows)
    }

    fn average_in_last_layer(&self, parameters: &mut Parameters) -> Result<()> {
        if self.shared {
            let why = "its layers share their weights, so that none of them can be one that averages";
            return Err(TensorError::Unsupported { operation: "average", why });
        }
        self.layers.last().map_or(Ok(()), |layer| layer.average(parameters))
    }

    fn query_key_value(&self, block: usize) -> Option<(Param, Option<Param>)> {
        self.layers.get(block).map(Block::query_key_value)
    }

    fn word_table(&self) -> Param {
        self.tables.word
    }
}

/// The rows of a table of relative positions that a batch needs, as layers take them: P×H.
fn normed_rows(pass: &mut Pass<'_>, table: Param, norm: Option<Norm>, positions: &RelativePositions) -> Result<Var> {
    let rows = positions.range();
    let x = pass.table(table.to_row(rows.end).from_row(rows.start));
    match norm {
        Some(norm) => pass.norm(x, &norm),
        None => Ok(x),
    }
}

/// How the encoder and what is pre-trained on it start, and how a task's head does.
///
/// What is pre-trained starts as in Devlin et al. (2019). Task heads start as those of `transformers`, a seventh larger without
/// the truncation: where a task has few updates, a smaller head costs points (docs/finetuning.md).
pub(crate) fn initial_weights(initializer_range: f64) -> (Init, Init) {
    (Init::TruncatedNormal(initializer_range as f32), Init::Normal(initializer_range as f32))
}
