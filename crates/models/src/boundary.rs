//! The head of SpanBERT's span-boundary objective (Joshi et al. 2020, section 3.2): each token of a masked span from the two
//! tokens around the span and its place within it. It is for training alone and no part of a saved model.
//!
//! Legend: T tokens in the flat batch, H hidden, V vocabulary, P targets, W width of places.

use henson_tensor::{Activation, Builder, EmbeddingTables, Init, Layout, Norm, Param, Pass, Result, Tensor, Var};

use crate::layers::{Linear, layer_norm};

/// Targets of a span at most; later tokens of longer ones are only predicted as masked tokens. `--max-pair-targets` of
/// SpanBERT's published command.
pub const BOUNDARY_TARGETS: usize = 15;

/// W.
const PLACE_WIDTH: usize = 200;

/// ε of both norms.
const EPSILON: f32 = 1e-12;

/// h = LN(GELU(W₂·LN(GELU(W₁·[x before; x behind; place])))), then the table of words and a bias of its own. W₁ is kept as
/// two matrices, for the two tokens and for the place, whose outputs are added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BoundaryHead {
    /// [`BOUNDARY_TARGETS`]×W.
    places: Param,
    /// H×2H.
    ends: Linear,
    /// H×W.
    place: Param,
    first_norm: Norm,
    second: Linear,
    second_norm: Norm,
    bias: Param,
}

impl BoundaryHead {
    pub(crate) fn build(b: &mut Builder, name: &str, (vocabulary, h): (usize, usize), init: Init) -> Self {
        b.at(name, |b| {
            let places = b.matrix("position_embeddings.weight", BOUNDARY_TARGETS, PLACE_WIDTH, init);
            let bias = b.padded_vector("bias", vocabulary, Init::Zeros);
            b.at("mlp_layer_norm", |b| Self {
                places,
                ends: Linear::build(b, "linear1", 2 * h, h, init),
                place: b.matrix("linear1_position.weight", h, PLACE_WIDTH, init),
                first_norm: layer_norm(b, "layer_norm1", h, EPSILON),
                second: Linear::build(b, "linear2", h, h, init),
                second_norm: layer_norm(b, "layer_norm2", h, EPSILON),
                bias,
            })
        })
    }

    /// Logits of targets: P×V, the columns padded to a multiple of 64.
    pub(crate) fn forward(
        &self,
        pass: &mut Pass<'_>,
        last: &Var,
        layout: &Layout,
        (ends, places): (&Tensor, &Tensor),
        table: Param,
    ) -> Result<Var> {
        let (p, h) = (places.shape().elements(), last.tensor().columns());
        // Rows that follow each other side by side.
        let ends = pass.gather(last, ends)?.reshape([p, 2 * h])?;
        let tables = EmbeddingTables { word: self.places, position: None, position_offset: 0, segment: None };
        let place = pass.embeddings(tables, places, places, None)?; // P×W
        let ends = self.ends.forward(pass, &ends, Activation::None)?;
        let place = pass.linear(&place, self.place, None, Activation::None)?;
        // Without dropout the layout is not read.
        let sum = pass.add_residual(ends, &place, layout, (0.0, 0))?;
        let x = pass.activate(&sum, Activation::Gelu)?;
        let x = pass.norm(x, &self.first_norm)?;
        let x = self.second.forward(pass, &x, Activation::Gelu)?;
        let x = pass.norm(x, &self.second_norm)?;
        pass.linear(&x, table, Some(self.bias), Activation::None)
    }
}
