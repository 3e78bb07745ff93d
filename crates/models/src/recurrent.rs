//! Recurrent networks: stacks of LSTM, GRU or plain layers with the names of `torch.nn`, conditional random fields with those of
//! `pytorch-crf`, and the tagger that stands on vectors of words (section 5.3 of Devlin et al. 2019).
//!
//! Legend: T tokens, I inputs of a layer, C units, P numbers of its state, D directions, W numbers of a word's vector, K labels.

use henson_tensor::{
    Builder, Cell, CrfParams, Directions, Group, Init, Layout, LegalSteps, MixParams, Pass, RecurrentLayer,
    RecurrentState, Result, Tensor, TensorError, Var,
};

use crate::layers::Linear;

/// Where dropout falls in a tagger: between layers from the first on, and before the classifier.
const BETWEEN: u32 = 0x7000;
const BEFORE_CLASSIFIER: u32 = 0x70ff;

/// The sizes of a stack of layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrentSettings {
    /// What its layers are made of.
    pub cell: Cell,
    /// I of the first layer; the others read D·P.
    pub input: usize,
    /// C.
    pub hidden: usize,
    /// P, where it is not C.
    pub projection: Option<usize>,
    /// How many layers.
    pub layers: usize,
    /// Which way they read.
    pub directions: Directions,
    /// The largest magnitude of an LSTM's cells; infinite: any.
    pub clip_cell: f32,
    /// The largest magnitude of what is projected; infinite: any.
    pub clip_projection: f32,
    /// What falls on the output of each layer but the last.
    pub dropout: f32,
    /// Whether it falls on the same columns at all tokens of a sequence.
    pub variational: bool,
    /// The first of as many sites of dropout as there are layers.
    pub site: u32,
    /// How weights start; none: as in PyTorch, evenly within 1/√C.
    pub init: Option<Init>,
    /// Whether it starts as TensorFlow's LSTM does: one bias, which opens the forget gates, and matrices by Glorot's rule.
    pub tensorflow: bool,
}

impl RecurrentSettings {
    /// One direction, without projection, clipping and dropout.
    pub fn new(cell: Cell, input: usize, hidden: usize, layers: usize) -> Self {
        Self {
            cell,
            input,
            hidden,
            projection: None,
            layers,
            directions: Directions::Forward,
            clip_cell: f32::INFINITY,
            clip_projection: f32::INFINITY,
            dropout: 0.0,
            variational: false,
            site: BETWEEN,
            init: None,
            tensorflow: false,
        }
    }

    /// D·P: what it gives for each token.
    pub fn output(&self) -> usize {
        self.directions.count() * self.projection.unwrap_or(self.hidden)
    }
}

/// A stack of recurrent layers.
#[derive(Clone, Debug)]
pub struct RecurrentStack {
    settings: RecurrentSettings,
    pub(crate) layers: Vec<RecurrentLayer>,
}

impl RecurrentStack {
    /// Lays out layers as `torch.nn.LSTM`, `GRU` and `RNN` name and start them.
    pub fn build(b: &mut Builder, settings: RecurrentSettings) -> Self {
        let build = |layer| b.group(Group::Layer(layer), |b| build_layer(b, &settings, layer));
        Self { settings, layers: (0..settings.layers).map(build).collect() }
    }

    /// T×I → T×D·P, from states of zeros.
    pub fn forward(&self, pass: &mut Pass<'_>, x: Var, layout: &Layout) -> Result<Var> {
        Ok(self.forward_from(pass, x, layout, &[])?.0)
    }

    /// The same from given states, one for each layer (or none at all); gives also those that sequences end with.
    pub fn forward_from(
        &self,
        pass: &mut Pass<'_>,
        x: Var,
        layout: &Layout,
        initial: &[RecurrentState],
    ) -> Result<(Var, Vec<RecurrentState>)> {
        let (outputs, last) = self.layers_from(pass, x.clone(), layout, initial)?;
        Ok((outputs.into_iter().next_back().unwrap_or(x), last))
    }

    /// The same with the output of every layer.
    pub fn layers_from(
        &self,
        pass: &mut Pass<'_>,
        mut x: Var,
        layout: &Layout,
        initial: &[RecurrentState],
    ) -> Result<(Vec<Var>, Vec<RecurrentState>)> {
        let RecurrentSettings { dropout, variational, site, .. } = self.settings;
        if !initial.is_empty() && initial.len() != self.layers.len() {
            let why = "the states to begin with are not one for each layer";
            return Err(TensorError::Unsupported { operation: "recurrent", why });
        }
        let (mut outputs, mut last) = (Vec::new(), Vec::new());
        for (i, layer) in self.layers.iter().enumerate() {
            if i > 0 {
                let at = (dropout, site + i as u32 - 1);
                x = match variational {
                    true => pass.variational_dropout(x, layout, at)?,
                    false => pass.dropout_tokens(x, layout, at)?,
                };
            }
            let output = pass.recurrent(&x, layer, layout, initial.get(i))?;
            x = output.out;
            outputs.push(x.clone());
            last.push(output.last);
        }
        Ok((outputs, last))
    }
}

fn build_layer(b: &mut Builder, settings: &RecurrentSettings, layer: usize) -> RecurrentLayer {
    let RecurrentSettings { cell, hidden, directions, clip_cell, clip_projection, .. } = *settings;
    let (input, width) = (if layer == 0 { settings.input } else { settings.output() }, cell.gates() * hidden);
    let state = settings.projection.unwrap_or(hidden);
    let plain = settings.init.unwrap_or(Init::Uniform(1.0 / (hidden.max(1) as f32).sqrt()));
    let glorot = |inputs: usize, outputs: usize| Init::Uniform((6.0 / (inputs + outputs).max(1) as f32).sqrt());
    // TensorFlow has the matrices of inputs and states in one.
    let [of_gates, of_projection, of_bias] = match settings.tensorflow {
        true => [glorot(input + state, width), glorot(hidden, state), Init::OpenForgetGates],
        false => [plain; 3],
    };
    // A layer that reads from right to left alone is a layer of its own, and has the plain names.
    let sides = if directions == Directions::Both { &["", "_reverse"][..] } else { &[""] };
    let names = |what: &str| -> Vec<String> { sides.iter().map(|side| format!("{what}_l{layer}{side}")).collect() };
    let matrices = |b: &mut Builder, what: &str, (rows, columns): (usize, usize), init: Init| {
        let names = names(what);
        b.side_by_side(&names.iter().map(String::as_str).collect::<Vec<_>>(), rows, columns, init)
    };
    let vectors = |b: &mut Builder, what: &str| {
        let names = names(what);
        b.vectors(&names.iter().map(String::as_str).collect::<Vec<_>>(), width, of_bias)
    };
    RecurrentLayer {
        cell,
        hidden,
        directions,
        input: matrices(b, "weight_ih", (width, input), of_gates),
        recurrent: matrices(b, "weight_hh", (width, state), of_gates),
        input_bias: Some(vectors(b, "bias_ih")),
        recurrent_bias: (!settings.tensorflow).then(|| vectors(b, "bias_hh")),
        projection: settings.projection.map(|p| matrices(b, "weight_hr", (p, hidden), of_projection)),
        clip_cell,
        clip_projection,
    }
}

/// Lays out a conditional random field of K labels, with transitions near 0.
pub fn build_crf(b: &mut Builder, labels: usize) -> CrfParams {
    let init = Init::Uniform(0.1);
    CrfParams {
        start_transitions: b.vector("start_transitions", labels, init),
        end_transitions: b.vector("end_transitions", labels, init),
        transitions: b.matrix_without_decay("transitions", labels, labels, init),
    }
}

/// The sizes of a tagger on vectors of words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WordTaggerSettings {
    /// Layers that lie side by side in a word's vector, to be mixed; 0: the vector is taken as it is.
    pub mixed: usize,
    /// W, after mixing.
    pub width: usize,
    /// Layers of the BiLSTM; 0: there is none.
    pub lstm_layers: usize,
    /// C of each direction.
    pub hidden: usize,
    /// K.
    pub labels: usize,
    /// Whether a field stands on the logits.
    pub crf: bool,
    /// Between the layers and before the classifier.
    pub dropout: f32,
}

/// A tagger on vectors of words: layers are mixed (where that is wanted), a BiLSTM reads the words (or not), and a matrix gives a
/// logit for each label; a conditional random field may stand on these.
#[derive(Clone, Debug)]
pub struct WordTagger {
    settings: WordTaggerSettings,
    mix: Option<MixParams>,
    lstm: Option<RecurrentStack>,
    classifier: Linear,
    crf: Option<CrfParams>,
    legal_steps: Option<LegalSteps>,
}

impl WordTagger {
    /// Lays out its parameters.
    pub fn build(b: &mut Builder, settings: WordTaggerSettings) -> Self {
        let WordTaggerSettings { mixed, width, lstm_layers, hidden, labels, crf, dropout } = settings;
        let mix = (mixed > 0).then(|| {
            b.at("mix", |b| MixParams {
                weights: b.vector("weights", mixed, Init::Zeros),
                gamma: b.vector("gamma", 1, Init::Ones),
            })
        });
        let lstm = RecurrentSettings {
            directions: Directions::Both,
            dropout,
            ..RecurrentSettings::new(Cell::Lstm, width, hidden, lstm_layers)
        };
        let read = if lstm_layers > 0 { lstm.output() } else { width };
        let lstm = (lstm_layers > 0).then(|| b.at("lstm", |b| RecurrentStack::build(b, lstm)));
        let init = Init::Uniform(1.0 / (read.max(1) as f32).sqrt());
        let classifier = b.at("classifier", |b| Linear {
            weight: b.matrix("weight", labels, read, init),
            bias: Some(b.vector("bias", labels, init)),
        });
        let crf = crf.then(|| b.at("crf", |b| build_crf(b, labels)));
        Self { settings, mix, lstm, classifier, crf, legal_steps: None }
    }

    /// Its sizes.
    pub fn settings(&self) -> &WordTaggerSettings {
        &self.settings
    }

    /// The field on its logits, where there is one.
    pub fn crf(&self) -> Option<&CrfParams> {
        self.crf.as_ref()
    }

    /// The same where only some labels may follow each other; see [`Model::with_legal_steps`](crate::Model).
    pub fn with_legal_steps(self, legal_steps: Option<LegalSteps>) -> Self {
        Self { legal_steps, ..self }
    }

    /// Which labels may follow each other; none: all.
    pub fn legal_steps(&self) -> Option<&LegalSteps> {
        self.legal_steps.as_ref()
    }

    /// T×n·W → T×K, in f32.
    pub fn logits(&self, pass: &mut Pass<'_>, vectors: &Tensor, layout: &Layout) -> Result<Var> {
        let mut x = pass.input(vectors)?;
        if let Some(mix) = &self.mix {
            x = pass.mix(&x, mix)?;
        }
        if let Some(lstm) = &self.lstm {
            x = lstm.forward(pass, x, layout)?;
        }
        let x = pass.dropout_tokens(x, layout, (self.settings.dropout, BEFORE_CLASSIFIER))?;
        self.classifier.logits(pass, &x)
    }
}
