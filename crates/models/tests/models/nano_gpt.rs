//! A trained GPT of three layers against every intermediate tensor that its author published (bbycroft/llm-viz): of the whole
//! network what it gives out, of the first block each operation. With HENSON_TEST_CUDA set, on the GPU as well.

use std::path::{Path, PathBuf};

use henson_models::{Batch, Capture, Head, Model, ModelConfig, Sequence};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{
    Activation, Attention, BiasValues, Builder, DType, Device, EmbeddingTables, Init, Norm, Param, Parameters, Pass,
    QueryKeyValue, Tape, Tensor, Var, Window,
};
use safetensors::SafeTensors;

/// f32 against f32, of numbers up to 10.
const TOLERANCE: f32 = 1e-5;

/// B sequences of S tokens; H; A.
const SIZES: [usize; 4] = [3, 11, 48, 3];

fn devices() -> Vec<Device> {
    let mut all = vec![Device::cpu(None, Some(2)).unwrap()];
    if std::env::var_os("HENSON_TEST_CUDA").is_some() {
        all.push(Device::cuda(&CudaOptions::default()).unwrap());
    }
    all
}

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/nano-gpt").join(name)
}

fn numbers(bytes: &[u8], name: &str) -> Vec<f32> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let data = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    data.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Parameters with the numbers that the file has under their names.
fn fill(builder: Builder, device: &Device) -> Parameters {
    let weights = std::fs::read(file("model.safetensors")).unwrap();
    let mut parameters = builder.finish(device, DType::F32).unwrap();
    for i in 0..parameters.entries().len() {
        let entry = &parameters.entries()[i];
        let stored = entry.from_stored(numbers(&weights, &entry.name));
        parameters.write(i, &stored).unwrap();
    }
    parameters.refresh().unwrap();
    parameters
}

/// What the author's program computed.
struct Partials(Vec<u8>);

impl Partials {
    fn open() -> Self {
        Self(std::fs::read(file("partials.safetensors")).unwrap())
    }

    #[track_caller]
    fn check(&self, name: &str, got: &[f32]) {
        let expected = numbers(&self.0, name);
        assert_eq!(got.len(), expected.len(), "{name}");
        let worst = got.iter().zip(&expected).fold(0.0_f32, |worst, (g, e)| worst.max((g - e).abs()));
        assert!(worst <= TOLERANCE, "{name}: off by {worst:e}");
    }

    fn batch(&self, device: &Device, config: &ModelConfig) -> Batch {
        let [_, s, ..] = SIZES;
        let ids: Vec<u32> = numbers(&self.0, "idx").into_iter().map(|id| id as u32).collect();
        let segments = vec![0; s];
        let sequences: Vec<Sequence<'_>> = ids.chunks(s).map(|ids| Sequence { ids, segments: &segments }).collect();
        Batch::new(device, config, &sequences, 0).unwrap()
    }
}

fn config() -> ModelConfig {
    let mut keys: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file("config.json")).unwrap()).unwrap();
    keys.as_object_mut().unwrap().remove("architectures");
    ModelConfig::from_value(keys).unwrap()
}

fn values(var: &Var) -> Vec<f32> {
    var.tensor().to_f32().unwrap()
}

#[test]
fn the_network_gives_what_its_author_published() {
    for device in devices() {
        let (partials, config) = (Partials::open(), config());
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &config, Head::MaskedLm).unwrap();
        let parameters = fill(builder, &device);
        let batch = partials.batch(&device, &config);
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let capture = Capture { hidden_states: true, attention_maps: true };
        let encoded = model.encode(&mut pass, &batch, capture).unwrap();
        for (name, state) in ["x", "block0", "block1", "ln_f"].iter().zip(&encoded.hidden_states) {
            partials.check(name, &values(state));
        }
        partials.check("attSm", &encoded.attention_maps[0].to_f32().unwrap());
        let rows: Vec<u32> = (0..batch.layout.tokens() as u32).collect();
        let rows = Tensor::from_slice(&device, [rows.len()], &rows).unwrap();
        let logits = values(&model.logits_of(&mut pass, encoded.last, &batch.layout, Some(&rows)).unwrap());
        let logits: Vec<f32> = logits.chunks(64).flat_map(|row| row[..3].to_vec()).collect();
        partials.check("lm_head", &logits);
        let softmax = |row: &[f32]| {
            let sum: f32 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(|x| x.exp() / sum).collect::<Vec<f32>>()
        };
        partials.check("probs", &logits.chunks(3).flat_map(softmax).collect::<Vec<f32>>());
    }
}

/// The parameters of the embeddings, the first block and the last block's norm.
struct Parts {
    words: Param,
    places: Param,
    norms: [Norm; 2],
    query_key_value: (Param, Param),
    projection: (Param, Param),
    up: (Param, Param),
    down: (Param, Param),
}

impl Parts {
    fn build(b: &mut Builder) -> Self {
        let [_, s, h, _] = SIZES;
        b.at("transformer", |b| {
            let words = b.matrix("wte.weight", 3, h, Init::Zeros);
            let places = b.matrix("wpe.weight", s, h, Init::Zeros);
            let norm = |b: &mut Builder, name: &str| {
                let [weight, bias] = ["weight", "bias"].map(|end| b.vector(&format!("{name}.{end}"), h, Init::Zeros));
                Norm { weight, bias: Some(bias), epsilon: 1e-5, centred: true }
            };
            let linear = |b: &mut Builder, name: &str, inputs: usize, outputs: usize| {
                let weight = b.transposed_matrix(&format!("{name}.weight"), outputs, inputs, Init::Zeros);
                (weight, b.vector(&format!("{name}.bias"), outputs, Init::Zeros))
            };
            b.at("h.0", |b| Self {
                words,
                places,
                norms: [norm(b, "ln_1"), norm(b, "ln_2")],
                query_key_value: linear(b, "attn.c_attn", h, 3 * h),
                projection: linear(b, "attn.c_proj", h, h),
                up: linear(b, "mlp.c_fc", h, 4 * h),
                down: linear(b, "mlp.c_proj", 4 * h, h),
            })
        })
    }
}

#[test]
fn so_does_each_operation_of_the_first_block() {
    let [sequences, s, h, heads] = SIZES;
    for device in devices() {
        let partials = Partials::open();
        let mut builder = Builder::new();
        let parts = Parts::build(&mut builder);
        let parameters = fill(builder, &device);
        let batch = partials.batch(&device, &config());
        let layout = &batch.layout;
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let tables = EmbeddingTables { word: parts.words, position: None, position_offset: 0, segment: None };
        let embed = |pass: &mut Pass<'_>, tables, ids| pass.embeddings(tables, ids, layout.positions(), None).unwrap();
        partials.check("tok_emb", &values(&embed(&mut pass, tables, &batch.ids)));
        let places = embed(&mut pass, EmbeddingTables { word: parts.places, ..tables }, layout.positions());
        partials.check("pos_emb", &values(&places)[..s * h]);
        let x = embed(&mut pass, EmbeddingTables { position: Some(parts.places), ..tables }, &batch.ids);
        partials.check("x", &values(&x));

        let linear = |pass: &mut Pass<'_>, x: &Var, (weight, bias): (Param, Param), activation: Activation| {
            pass.linear(x, weight, Some(bias), activation).unwrap()
        };
        let y = pass.norm(x.clone(), &parts.norms[0]).unwrap();
        partials.check("ln1", &values(&y));
        let qkv = linear(&mut pass, &y, parts.query_key_value, Activation::None);
        partials.check("qkv", &values(&qkv));
        let attention = Attention { window: Window::CAUSAL, ..Attention::new(heads, h / heads) };
        let (from, layouts, bias) = (QueryKeyValue::Fused(qkv), (layout, layout), BiasValues::None);
        let maps = pass.attention_maps(&attention, &from, &bias, layouts).unwrap().to_f32().unwrap();
        partials.check("attSm", &maps);
        // Scores never exist as such: up to a number for each row, they are the logarithms of the probabilities.
        let scores = numbers(&partials.0, "att");
        for row in 0..sequences * heads * s {
            let (seen, row) = (row % s + 1, row * s);
            assert!(scores[row + seen..row + s].iter().all(|score| *score == f32::NEG_INFINITY));
            for i in row..row + seen {
                let (score, log) = (scores[i] - scores[row], (maps[i] / maps[row]).ln());
                assert!((score - log).abs() <= 2.0 * TOLERANCE, "att {i}: {log}, not {score}");
            }
        }
        let y = pass.attention(&attention, from, &bias, layouts, (0.0, 0)).unwrap();
        partials.check("y", &values(&y));
        let y = linear(&mut pass, &y, parts.projection, Activation::None);
        partials.check("yProj", &values(&y));
        let x = pass.add_residual(y, &x, layout, (0.0, 0)).unwrap();
        partials.check("attnResid", &values(&x));
        let y = pass.norm(x.clone(), &parts.norms[1]).unwrap();
        partials.check("ln2", &values(&y));
        partials.check("fc", &values(&linear(&mut pass, &y, parts.up, Activation::None)));
        let y = linear(&mut pass, &y, parts.up, Activation::GeluTanh);
        partials.check("gelu", &values(&y));
        let y = linear(&mut pass, &y, parts.down, Activation::None);
        partials.check("mlp", &values(&y));
        let x = pass.add_residual(y, &x, layout, (0.0, 0)).unwrap();
        partials.check("mlpResid", &values(&x));
    }
}
