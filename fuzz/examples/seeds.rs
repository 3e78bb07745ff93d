//! Writes small valid files to begin with into `corpus/`: mutations of these reach further than noise.

use std::path::Path;

use henson_text::{Tokenizer, WordPieceOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let directory = here.join("corpus").join(target);
        std::fs::create_dir_all(&directory)?;
        std::fs::write(directory.join(name), bytes)
    };

    for (i, (header, size)) in [
        (r#"{}"#, 0),
        (r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}"#, 8),
        (
            r#"{"a":{"dtype":"F16","shape":[3],"data_offsets":[0,6]},"b":{"dtype":"BF16","shape":[1],"data_offsets":[6,8]},"c":{"dtype":"F64","shape":[],"data_offsets":[8,16]}}"#,
            16,
        ),
        (r#"{"a":{"dtype":"I64","shape":[1,1],"data_offsets":[1,9]},"b":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}}"#, 9),
        (r#"{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]},"z":{"dtype":"F32","shape":[0,9],"data_offsets":[1,1]}}"#, 1),
    ]
    .into_iter()
    .enumerate()
    {
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0x3c; size]].concat();
        write("safetensors", &i.to_string(), &file)?;
    }

    write("index", "0", br#"{"metadata":{"total_size":8},"weight_map":{"a":"model-00001-of-00002.safetensors"}}"#)?;
    write("index", "1", br#"{"weight_map":{"a":"x.safetensors","b":"y.safetensors"}}"#)?;

    let golden = here.join("../tests-data/torch-files");
    for entry in std::fs::read_dir(golden)? {
        let entry = entry?;
        write("torch", &entry.file_name().to_string_lossy(), &std::fs::read(entry.path())?)?;
    }

    write("hdf5", "elmo", &std::fs::read(here.join("../tests-data/elmo/skip/lm_weights.hdf5"))?)?;

    let golden = here.join("../tests-data/bert-golden");
    for name in ["model", "sequence", "multilabel"] {
        write("config", name, &std::fs::read(golden.join(name).join("config.json"))?)?;
    }
    let golden = here.join("../tests-data/writers-golden");
    for name in [
        "gpt2/lm",
        "gpt2-scaled/lm",
        "openai-gpt/choice",
        "t5/sequence",
        "t5-v1_1/seq2seq",
        "bart/qa",
        "marian/seq2seq",
    ] {
        write("config", &name.replace('/', "-"), &std::fs::read(golden.join(name).join("config.json"))?)?;
    }

    write("vectors", "glove", b"the 0.5 -1\n. . . 1 2\n")?;
    write("vectors", "text", b"2 2\nthe 0.5 -1\nof 1 2\n")?;
    write("vectors", "binary", b"2 1\nthe \0\0\x80?\nof \0\0\0@\n")?;

    write("tables", "csv", b"text,label\n\"a, \"\"b\"\"\nc\",x\n\nd,y\n")?;
    write("tables", "tsv", b"text\tlabel\r\na b\t1\r\n")?;
    write("tables", "jsonl", b"{\"text\": \"a\", \"label\": [1, null]}\n[{\"text\": {}}]\n")?;
    write("tables", "array", b" [{\"a\": 1.5}, {\"b\": \"\\ud83d\\ude00\"}]")?;
    write("tables", "fasttext", b"__label__x __label__y a text\n__label__z b\n")?;
    write("tables", "conll", b"-DOCSTART- O\n\na B-X\nb O\n\n# newdoc\n1\tc\tO\n")?;
    for name in ["rte", "squad", "tags-named"] {
        let bytes = std::fs::read(here.join("../tests-data/tasks").join(format!("{name}.parquet")))?;
        write("tables", name, &bytes)?;
    }

    write("probe", "pair", br#"{"text": "jim sings a song", "targets": [{"span1": [0, 1], "span2": [2, 4], "label": ["A", "B"]}]}"#)?;
    write("probe", "span", br#"{"text": "jim sings", "targets": [{"span1": [0, 1], "label": "A"}, {"span1": [1, 2], "label": "B"}]}"#)?;
    write("probe", "rows", br#"{"tokens": ["jim", "sings"], "tags": ["B-PER", "O"]}"#)?;
    write("probe", "conll", b"jim B-PER\nhenson I-PER\nsings O\n\nold B-LOC\nsea I-LOC\n")?;
    write(
        "probe",
        "conllu",
        b"# text = Jim sings\n1\tJim\tjim\tPROPN\t_\t_\t2\tnsubj\t_\t_\n2\tsings\tsing\tVERB\t_\t_\t0\troot\t_\t_\n\n",
    )?;

    // Bodies: two examples with three values and none; two vectors of one number.
    let value = 1.5_f32.to_le_bytes();
    let count = |n: u32| n.to_le_bytes();
    let outputs = [&2_u64.to_le_bytes()[..], &count(1), &count(3), &value, &value, &value, &count(0)].concat();
    write("kept", "outputs", &outputs)?;
    write("kept", "vectors", &[&count(1)[..], &2_u64.to_le_bytes(), &[7; 16], &value, &[8; 16], &value].concat())?;

    let models = here.join("../crates/text/tests/data/sentencepiece");
    for name in ["unigram-rules", "unigram-bytes", "bpe-symbols", "bpe-suffix", "bpe-unused"] {
        write("sentencepiece", name, &std::fs::read(models.join(format!("{name}.model")))?)?;
    }

    for (case, file) in [
        ("dense", "modules.json"),
        ("several", "1_Pooling/config.json"),
        ("old", "1_Pooling/config.json"),
        ("dense", "2_Dense/config.json"),
        ("prompt", "config_sentence_transformers.json"),
        ("old", "sentence_bert_config.json"),
    ] {
        let bytes = std::fs::read(here.join("../tests-data/sentence/embed").join(case).join(file))?;
        write("sentence", &format!("{case}-{}", file.replace('/', "-")), &bytes)?;
    }

    let tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "jim", "hen", "##son", "a", "puppet", "##eer", "中"];
    let tokenizer = Tokenizer::from_vocabulary(&tokens, &WordPieceOptions::default())?;
    for (name, bytes) in tokenizer.files(None)? {
        if name == "tokenizer.json" {
            write("tokenizer", "wordpiece", &bytes)?;
        }
    }
    for (name, json) in [
        (
            "bpe",
            r#"{"version":"1.0","added_tokens":[{"id":0,"content":"<s>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},"post_processor":{"type":"RobertaProcessing","sep":["<s>",0],"cls":["<s>",0],"trim_offsets":true,"add_prefix_space":false},"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":"","end_of_word_suffix":"","fuse_unk":false,"byte_fallback":false,"vocab":{"<s>":0,"a":1,"b":2,"ab":3},"merges":[["a","b"]]}}"#,
        ),
        (
            "unigram",
            r#"{"version":"1.0","added_tokens":[],"normalizer":{"type":"Sequence","normalizers":[{"type":"NFKC"},{"type":"Replace","pattern":{"Regex":" {2,}"},"content":" "}]},"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},"post_processor":null,"decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},"model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["▁a",-1.5],["b",-2.0]],"byte_fallback":false}}"#,
        ),
    ] {
        write("tokenizer", name, json.as_bytes())?;
    }

    for (i, body) in [
        r#"{"inputs": ["a", "b"], "normalize": true, "truncate": false, "truncation_direction": "Left", "dimensions": 3}"#,
        r#"{"inputs": [[1, 2], [3]], "prompt_name": "query", "model": "m"}"#,
        r#"{"inputs": [["a"], ["b", "c"]], "raw_scores": true}"#,
        r#"{"input": "a", "encoding_format": "base64", "user": "u"}"#,
        r#"{"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": true}}"#,
        r#"{"query": "a", "texts": ["b"], "return_text": true}"#,
        r#"{"question": "a", "context": "b", "top": 2}"#,
        r#"{"ids": [1, 2], "skip_special_tokens": false}"#,
        r#"{"word": "a", "inputs": ["b \ud83d\ude00 \u0000"]}"#,
        r#"{"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "best_of": 3, "echo": true, "logprobs": 2, "stop": ["x", "y"], "seed": -1}"#,
        r#"{"prompt": [[1, 2]], "logit_bias": {"7": -100, "8": 1.5}, "temperature": 0, "top_p": 0.5, "presence_penalty": 1, "stream": true, "stream_options": {"include_usage": true}}"#,
        r#"{"inputs": "a", "parameters": {"max_new_tokens": 3, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1, "stop": ["x"], "best_of": 2, "details": true, "decoder_input_details": true, "top_n_tokens": 2, "truncate": 3}, "stream": false}"#,
    ]
    .into_iter()
    .enumerate()
    {
        write("requests", &i.to_string(), body.as_bytes())?;
    }

    for (i, request) in henson_serve::fuzzing::examples().iter().enumerate() {
        write("routes", &i.to_string(), request)?;
    }

    // A corpus of an old version; its shards lose header and footer, which the target puts around what it is given.
    let corpus = here.join("../crates/data/tests/build/version-1");
    write("manifest", "version-1", &std::fs::read(corpus.join("corpus.json"))?)?;
    for (name, documents, sentences) in [("train-00000", 2_u8, 4), ("held-out-00000", 1, 1)] {
        let shard = std::fs::read(corpus.join(format!("{name}.shard")))?;
        write("shard", name, &shard)?;
        write(
            "shard",
            &format!("{name}-body"),
            &[&[documents << 1, sentences], &shard[16..shard.len() - 48]].concat(),
        )?;
    }
    Ok(())
}
