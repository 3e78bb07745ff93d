//! Configs of models that write, as nobody should write them: each wrong value is an error that names its key, and whatever is
//! accepted can be laid out.

use henson_models::{Family, Head, Model, ModelConfig};
use henson_tensor::Builder;
use serde_json::{Value, json};

/// A small size of every kind.
const SIZES: [&str; 6] = ["gpt2-tiny", "openai-gpt", "t5-mini", "t5-v1_1-mini", "bart-mini", "transformer-mini"];

fn config(size: &str) -> Value {
    Family::config_of_size(size).unwrap().to_json().unwrap()
}

fn refused(size: &str, key: &str, value: &Value) -> String {
    let mut keys = config(size);
    keys[key] = value.clone();
    match ModelConfig::from_value(keys) {
        Ok(_) => panic!("{size}: `{key}` may be {value}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn sizes_out_of_range_are_refused_by_name() {
    let t5 = ["vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads"];
    let gpt = ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"];
    let bart = [
        "vocab_size",
        "max_position_embeddings",
        "d_model",
        "encoder_layers",
        "encoder_attention_heads",
        "encoder_ffn_dim",
        "decoder_layers",
        "decoder_attention_heads",
        "decoder_ffn_dim",
    ];
    let all: [(&str, &[&str]); 6] = [
        ("gpt2-tiny", &gpt),
        ("openai-gpt", &gpt),
        ("t5-mini", &t5),
        ("t5-v1_1-mini", &["relative_attention_num_buckets", "relative_attention_max_distance"]),
        ("bart-mini", &bart),
        ("transformer-mini", &bart),
    ];
    let wrong = [json!(0), json!(-1), json!(1.5), json!(u64::MAX), json!(1e300), json!("12"), json!(true), json!([8])];
    for (size, keys) in all {
        for (key, value) in keys.iter().flat_map(|key| wrong.iter().map(move |value| (key, value))) {
            let error = refused(size, key, value);
            assert!(error.contains(&format!("`{key}`")), "{size}: {key} = {value}: {error}");
        }
    }
}

#[test]
fn values_that_contradict_or_are_unknown_are_refused_by_name() {
    let cases = [
        ("gpt2-tiny", "n_head", json!(5), "divisor"),
        ("gpt2-tiny", "n_inner", json!(0), "1 to"),
        ("gpt2-tiny", "activation_function", json!("mish"), "gelu_new"),
        ("gpt2-tiny", "add_cross_attention", json!(true), "false"),
        ("gpt2-tiny", "layer_norm_epsilon", json!(0.0), "positive"),
        ("gpt2-tiny", "layer_norm_epsilon", json!(1e9), "positive"),
        ("gpt2-tiny", "attn_pdrop", json!(1.0), "below 1"),
        ("gpt2-tiny", "embd_pdrop", json!(-0.1), "below 1"),
        ("gpt2-tiny", "resid_pdrop", json!("much"), "invalid type"),
        ("gpt2-tiny", "summary_type", json!("attn"), "cls_index"),
        ("openai-gpt", "n_head", json!(7), "divisor"),
        ("openai-gpt", "afn", json!("tanh"), "gelu"),
        ("openai-gpt", "is_encoder_decoder", json!(true), "false"),
        ("t5-mini", "feed_forward_proj", json!("gated-"), "relu"),
        ("t5-mini", "feed_forward_proj", json!(3), "invalid type"),
        ("t5-mini", "relative_attention_num_buckets", json!(6), "multiple of 4"),
        ("t5-mini", "relative_attention_max_distance", json!(16), "more than half"),
        ("t5-mini", "eos_token_id", json!(32_128), "less than vocab_size"),
        ("t5-mini", "pad_token_id", json!(-1), "invalid value"),
        ("t5-mini", "dropout_rate", json!(2), "below 1"),
        ("t5-mini", "classifier_dropout", json!(1), "below 1"),
        ("t5-mini", "tie_word_embeddings", json!("yes"), "invalid type"),
        ("t5-mini", "is_decoder", json!(true), "false"),
        ("bart-mini", "decoder_attention_heads", json!(3), "divisor"),
        ("bart-mini", "activation_function", json!("swiglu"), "gelu"),
        ("bart-mini", "classifier_dropout", json!(1.5), "below 1"),
        ("bart-mini", "eos_token_id", json!(50_265), "less than vocab_size"),
        ("bart-mini", "tie_word_embeddings", json!(false), "true"),
        ("bart-mini", "static_position_embeddings", json!(true), "false"),
        ("transformer-mini", "encoder_attention_heads", json!(3), "divisor"),
        ("transformer-mini", "activation_function", json!(null), "invalid type"),
        ("transformer-mini", "normalize_embedding", json!(true), "false"),
        ("transformer-mini", "normalize_before", json!(true), "false"),
    ];
    for (size, key, value, expected) in cases {
        let error = refused(size, key, &value);
        assert!(error.contains(&format!("`{key}`")) && error.contains(expected), "{size}: {error}");
    }
    // A config may leave out what has a default.
    for model_type in ["gpt2", "openai-gpt", "t5", "mt5", "bart", "marian"] {
        let bare = ModelConfig::from_value(json!({ "model_type": model_type })).unwrap();
        assert_eq!(bare.model_type(), model_type);
    }
}

/// Every key with values of every kind: an error, or a model that can be laid out with every head.
#[test]
fn nothing_panics() {
    let values = [
        json!(0),
        json!(1),
        json!(7),
        json!(-1),
        json!(0.5),
        json!(4_294_967_296_u64),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("gated-gelu"),
        json!(true),
        json!(false),
        json!(null),
        json!([]),
        json!({}),
    ];
    let mut accepted = 0;
    for size in SIZES {
        let whole = config(size);
        for key in whole.as_object().unwrap().keys() {
            for value in &values {
                let mut keys = whole.clone();
                keys[key] = value.clone();
                let Ok(config) = ModelConfig::from_value(keys) else { continue };
                accepted += 1;
                for head in config.family().heads {
                    let head = head.with_labels(if matches!(head, Head::Token { .. }) { 1 } else { 3 });
                    Model::build(&mut Builder::new(), &config, head).unwrap();
                }
                assert_eq!(ModelConfig::from_value(config.to_json().unwrap()).unwrap(), config, "{size}: {key}");
            }
        }
    }
    assert!(accepted > 100, "{accepted}");
}
