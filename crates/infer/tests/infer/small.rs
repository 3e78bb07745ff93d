//! A tiny model with a tokenizer of its own: filling, features, windows, and directories that do not fit.

use std::path::{Path, PathBuf};

use henson_infer::{Carried, EmbedSettings, Layers, Length, Model, Pooling, Read, Want};
use henson_tensor::DType;
use tempfile::TempDir;

fn golden(head: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden").join(head)
}

/// The golden weights of a head, with a vocabulary of its 71 pieces.
fn directory(head: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden(head).join(file), directory.path().join(file)).unwrap();
    }
    write_vocabulary(directory.path(), 71);
    directory
}

fn write_vocabulary(directory: &Path, pieces: usize) {
    let mut vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).to_vec();
    vocabulary.extend((b'a'..=b'z').map(|c| char::from(c).to_string()));
    while vocabulary.len() < pieces {
        vocabulary.push(format!("word{}", vocabulary.len()));
    }
    std::fs::write(directory.join("vocab.txt"), vocabulary.join("\n") + "\n").unwrap();
}

fn open(directory: &Path, want: Want) -> henson_infer::Result<Model> {
    Model::open(directory, &crate::common::device(None, Some(2)), DType::F32, want)
}

#[track_caller]
fn assert_fails(directory: &Path, want: Want, parts: &[&str]) {
    let error = match open(directory, want) {
        Ok(_) => panic!("it opened"),
        Err(error) => error,
    };
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    for part in parts {
        assert!(text.contains(part), "expected `{part}` in: {text}");
    }
}

#[test]
fn fills_every_blank_in_order() {
    let directory = directory("mlm");
    let model = open(directory.path(), Want::MaskedLm).unwrap();
    let texts = ["a [MASK] c [MASK]", "[MASK]"];
    let filled = model.fill(&texts, 71, Length::CUT).unwrap();
    assert_eq!(filled[0].blanks.len(), 2);
    assert_eq!((filled[0].blanks[1].start, filled[0].blanks[1].end), (11, 17));
    for blank in filled.iter().flat_map(|f| &f.blanks) {
        let sum: f32 = blank.candidates.iter().map(|c| c.probability).sum();
        assert!((sum - 1.0).abs() < 1e-4, "probabilities add up to {sum}");
        assert!(blank.candidates.windows(2).all(|w| w[0].probability >= w[1].probability));
    }
    let alone = model.fill(&texts[1..], 3, Length::CUT).unwrap();
    let best = |f: &henson_infer::Filled| f.blanks[0].candidates[..3].iter().map(|c| c.id).collect::<Vec<_>>();
    assert_eq!(best(&alone[0]), best(&filled[1]), "company changes nothing");

    let error = model.fill(&["a b", "nothing missing"], 1, Length::CUT).unwrap_err().to_string();
    assert!(error.contains("text 1") && error.contains("[MASK]"), "{error}");
}

#[test]
fn a_blank_beyond_the_end_is_found_by_windows_alone() {
    let directory = directory("mlm");
    let model = open(directory.path(), Want::MaskedLm).unwrap();
    let text = format!("{} [MASK]", "a b c ".repeat(30));
    let cut = &model.fill(&[&text], 2, Length::CUT).unwrap()[0];
    assert!(cut.dropped > 0 && cut.blanks[0].candidates.is_empty());
    let whole = &model.fill(&[&text], 2, Length::WINDOWS).unwrap()[0];
    assert!(whole.dropped == 0 && whole.blanks[0].candidates.len() == 2);
}

#[test]
fn layers_are_what_they_say() {
    let directory = directory("pretraining");
    let model = open(directory.path(), Want::Encoder).unwrap();
    let get = |layers: &str| {
        let layers: Layers = layers.parse().unwrap();
        model.features(&["a b word40"], layers, Length::CUT).unwrap().remove(0)
    };
    let (embeddings, first, last) = (get("embeddings"), get("1"), get("last"));
    assert_eq!(last.tokens, ["[CLS]", "a", "b", "word40", "[SEP]"]);
    assert_eq!(last.offsets, [None, Some((0, 1)), Some((2, 3)), Some((4, 10)), None]);
    let sum: Vec<f32> = first.vectors.iter().zip(&last.vectors).map(|(a, b)| a + b).collect();
    assert_eq!(get("sum-last-2").vectors, sum);
    assert_eq!(get("sum-all").vectors, sum);
    let row = |f: &henson_infer::TokenFeatures, t: usize| f.vectors[t * f.width..(t + 1) * f.width].to_vec();
    let all = get("all");
    assert_eq!(all.width, 3 * 24);
    assert_eq!(row(&all, 3), [row(&embeddings, 3), row(&first, 3), row(&last, 3)].concat());
    assert_eq!(row(&get("concat-last-2"), 1), [row(&first, 1), row(&last, 1)].concat());
}

#[test]
fn poolings_are_what_they_say() {
    let directory = directory("model");
    let model = open(directory.path(), Want::Encoder).unwrap();
    let tokens = model.features(&["a b c"], Layers::One(-1), Length::CUT).unwrap().remove(0);
    let rows: Vec<&[f32]> = tokens.vectors.chunks(24).collect();
    let embed = |pooling, normalise| {
        let settings = EmbedSettings { pooling: vec![pooling], normalise, ..EmbedSettings::default() };
        model.embed(&["a b c"], &settings, false).unwrap().remove(0).vector
    };
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(near(&embed(Pooling::First, false), rows[0]));
    let mean: Vec<f32> = (0..24).map(|c| rows.iter().map(|r| r[c]).sum::<f32>() / 5.0).collect();
    assert!(near(&embed(Pooling::Mean, false), &mean));
    let most: Vec<f32> = (0..24).map(|c| rows.iter().map(|r| r[c]).fold(f32::MIN, f32::max)).collect();
    assert!(near(&embed(Pooling::Max, false), &most));
    let length: f32 = embed(Pooling::Mean, true).iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-6);
}

#[test]
fn directories_that_do_not_fit_are_explained() {
    let d = directory("mlm");
    write_vocabulary(d.path(), 80);
    assert_fails(d.path(), Want::Encoder, &["80 tokens", "71", "do not belong together"]);

    let d = directory("model");
    assert_fails(d.path(), Want::MaskedLm, &["cls.predictions.bias", "do not fit"]);

    let d = directory("mlm");
    let config = std::fs::read_to_string(d.path().join("config.json")).unwrap();
    let change = |from: &str, to: &str| {
        assert!(config.contains(from), "{from} is not in {config}");
        std::fs::write(d.path().join("config.json"), config.replace(from, to)).unwrap();
    };
    change("\"vocab_size\": 71", "\"vocab_size\": 72");
    assert_fails(d.path(), Want::Encoder, &["vocabulary does not fit"]);
    // A config that promises 6 TB of weights is refused before anything is allocated.
    change("\"vocab_size\": 71", "\"vocab_size\": 16000000");
    assert_fails(d.path(), Want::Encoder, &["vocabulary does not fit"]);
    change("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1000");
    assert_fails(d.path(), Want::Encoder, &["encoder.layer.2."]);
    change("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    assert_fails(d.path(), Want::Encoder, &["encoder.layer.1.", "num_hidden_layers"]);
    change("\"model_type\": \"bert\"", "\"model_type\": \"gpt9\"");
    assert_fails(d.path(), Want::Encoder, &["gpt9", "bert"]);
    change("\"hidden_size\": 24", "\"hidden_size\": \"wide\"");
    assert_fails(d.path(), Want::Encoder, &["config.json", "expected usize"]);
    std::fs::write(d.path().join("config.json"), "{\n  \"vocab_size\": 7,,\n").unwrap();
    assert_fails(d.path(), Want::Encoder, &["config.json", "line 2"]);
    std::fs::remove_file(d.path().join("config.json")).unwrap();
    assert_fails(d.path(), Want::Encoder, &["config.json"]);

    let d = directory("mlm");
    std::fs::remove_file(d.path().join("vocab.txt")).unwrap();
    assert_fails(d.path(), Want::Encoder, &["tokenizer.json", "vocab.txt"]);
    let d = directory("mlm");
    std::fs::remove_file(d.path().join("model.safetensors")).unwrap();
    assert_fails(d.path(), Want::Encoder, &["model.safetensors"]);
    let d = directory("mlm");
    let weights = std::fs::read(d.path().join("model.safetensors")).unwrap();
    std::fs::write(d.path().join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    assert_fails(d.path(), Want::Encoder, &["model.safetensors"]);
    // One number becomes NaN.
    let mut broken = weights.clone();
    let end = broken.len();
    broken[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(d.path().join("model.safetensors"), &broken).unwrap();
    assert_fails(d.path(), Want::MaskedLm, &["NaN"]);
}

#[test]
fn sentence_transformers_settings_are_checked() {
    let d = directory("model");
    let settings = |modules: &str| {
        std::fs::write(d.path().join("modules.json"), modules).unwrap();
        EmbedSettings::of_directory(d.path()).map_err(|e| e.to_string())
    };
    let dense = r#"[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]"#;
    assert!(settings(dense).unwrap_err().contains("expected a Transformer, a Pooling"));
    let outside = r#"[{"type": "sentence_transformers.models.Pooling", "path": "../elsewhere"}]"#;
    assert!(settings(outside).unwrap_err().contains("leads elsewhere"));
    assert!(settings("[1, 2").unwrap_err().contains("modules.json"));
}

/// Weights that overflow for long texts alone: the text is named, and the others of the batch keep their bits.
#[test]
fn what_is_not_finite_names_its_text_and_harms_no_other() {
    let directory = directory("mlm");
    let path = directory.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let embeddings = tensors.tensor("bert.embeddings.position_embeddings.weight").unwrap();
    let (start, width) = (embeddings.data().as_ptr() as usize - bytes.as_ptr() as usize, embeddings.shape()[1] * 4);
    let healthy = open(directory.path(), Want::AsSaved).unwrap();
    let mut broken = bytes.clone();
    for number in broken[start + 9 * width..start + 10 * width].chunks_exact_mut(4) {
        number.copy_from_slice(&3.4e38_f32.to_le_bytes());
    }
    std::fs::write(&path, broken).unwrap();
    let model = open(directory.path(), Want::AsSaved).unwrap();
    let settings = EmbedSettings { normalise: true, ..EmbedSettings::default() };
    let layers = |layers: &str| layers.parse::<Layers>().unwrap();
    let text_of = |error: henson_infer::InferError| match error {
        henson_infer::InferError::NotFinite { text } => text,
        other => panic!("{other}"),
    };
    let texts = ["a b c", "[MASK] b", "a b c d e f g h i [MASK]", "c [MASK]"];
    assert_eq!(text_of(model.embed(&texts, &settings, false).unwrap_err()), 3);
    assert_eq!(text_of(model.features(&texts, layers("sum-last-2"), Length::CUT).unwrap_err()), 3);
    assert_eq!(text_of(model.features(&texts, layers("embeddings"), Length::CUT).unwrap_err()), 3);
    assert_eq!(text_of(model.fill(&texts[1..], 3, Length::CUT).unwrap_err()), 2);
    assert_eq!(text_of(model.attention(henson_infer::Input::One(texts[2]), None).unwrap_err()), 1);
    let long = "a ".repeat(100);
    assert_eq!(text_of(model.embed(&["b", &long], &settings, true).unwrap_err()), 2);
    // The caller's numbers.
    let error = model.embed(&texts, &settings, false).unwrap_err().numbered(&[5, 6, 9, 10]);
    assert!(error.to_string().contains("text 9"), "{error}");

    // All in one batch: the neighbours have the numbers that healthy weights give, to the bit.
    let sequence = |text: &str| {
        let pieces = model.tokenizer().encode(text).unwrap();
        model.tokenizer().template().single(&pieces, 40).unwrap()
    };
    let sequences = texts.map(sequence);
    let pooled = Read::Pooled { pooling: Pooling::ALL.to_vec(), skip: 0 };
    for read in [pooled, Read::Tokens, Read::Attention, Read::Layers(layers("concat-last-2"))] {
        let batch: Vec<_> = sequences.iter().map(|features| (features, &read)).collect();
        let outputs = model.read(&batch).unwrap();
        for (i, output) in outputs.iter().enumerate() {
            let alone = healthy.read(&batch[i..=i]).unwrap().remove(0);
            match (i, crate::common::company_keeps_bits()) {
                (2, _) => assert!(output.is_none() && alone.is_some(), "{read:?}"),
                (_, true) => assert!(*output == alone, "{read:?} of text {i}"),
                (_, false) => assert!(output.is_some(), "{read:?} of text {i}"),
            }
        }
    }
}

fn elmo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/elmo/skip")
}

/// Tokens are bytes; what is given are words, where they stand in the text.
#[test]
fn elmo_gives_features_of_words() {
    let model = open(&elmo(), Want::Encoder).unwrap();
    let text = " The na\u{ef}ve\tcat .\n";
    let all = &model.features(&[text], "all".parse().unwrap(), Length::CUT).unwrap()[0];
    assert_eq!(all.tokens, ["<S>", "The", "na\u{ef}ve", "cat", ".", "</S>"]);
    let places: Vec<_> = all.offsets.iter().flatten().map(|(start, end)| &text[*start..*end]).collect();
    assert_eq!(places, all.tokens[1..5]);
    assert_eq!((all.width, all.vectors.len()), (96, 6 * 96));
    // Layer 0 is the word's vector twice, whatever stands around it.
    let again = &model.features(&["cat"], "all".parse().unwrap(), Length::CUT).unwrap()[0];
    let (cat, alone) = (&all.vectors[3 * 96..4 * 96], &again.vectors[96..192]);
    assert_eq!(cat[..16], cat[16..32]);
    assert_eq!(cat[..32], alone[..32]);
    assert_ne!(cat[32..], alone[32..]);
    // A text's vector is the mean over its words, without the marks around it.
    let settings = EmbedSettings::default();
    let vector = &model.embed(&[text], &settings, false).unwrap()[0];
    let last = &model.features(&[text], Layers::One(-1), Length::CUT).unwrap()[0];
    for (c, x) in vector.vector.iter().enumerate() {
        let mean = (1..5).map(|word| last.vectors[word * 32 + c]).sum::<f32>() / 4.0;
        assert!((x - mean).abs() < 1e-6, "{x} {mean}");
    }
    assert!(model.embed(&["", " \n"], &settings, false).is_ok());
    assert_fails(&elmo(), Want::MaskedLm, &["ElmoModel"]);
    // One text after the other, each where the one before it ended: two calls are one.
    let (texts, mut carried, mut parts) = (["The cat sat .", "a dog", "The cat sat ."], Carried::default(), Vec::new());
    let last = Layers::One(-1);
    let whole = model.features_in_turn(&texts, last, Length::CUT, &mut Carried::default()).unwrap();
    for text in texts {
        parts.extend(model.features_in_turn(&[text], last, Length::CUT, &mut carried).unwrap());
    }
    for (whole, part) in whole.iter().zip(&parts) {
        assert_eq!(whole.vectors, part.vectors);
    }
    assert_ne!(whole[0].vectors, whole[2].vectors);
    let alone = model.features(&[texts[0]], last, Length::CUT).unwrap();
    assert_eq!(whole[0].vectors, alone[0].vectors);
    let bert = directory("model");
    let bert = open(bert.path(), Want::Encoder).unwrap();
    let error = bert.features_in_turn(&["a"], last, Length::CUT, &mut carried).unwrap_err().to_string();
    assert!(error.contains("recurrent networks"), "{error}");
}
