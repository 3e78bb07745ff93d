//! Bytes as the body of a request to each route of a whole server with small models of every kind: whatever they are, they
//! get a proper status and an answer in JSON. The first byte chooses the route, the second the model.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use henson_serve::Source;
use henson_serve::fuzzing::Server;

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests-data");
    let root = std::env::temp_dir().join(format!("henson-fuzz-{}", std::process::id()));
    let mut pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).to_vec();
    pieces.extend((b'a'..=b'z').map(|c| char::from(c).to_string()));
    pieces.extend((b'a'..=b'z').map(|c| format!("##{}", char::from(c))));
    pieces.extend((pieces.len()..71).map(|i| format!("word{i}")));
    let heads = ["mlm", "sequence", "multilabel", "regression", "token", "qa", "choice"];
    let heads = heads.map(|name| (name, "bert-golden", 71));
    // Those that write: a decoder and an encoder-decoder.
    let writers = ["gpt2", "bart"].map(|name| (name, "writers", 40));
    let models = heads.into_iter().chain(writers).map(|(name, folder, vocabulary)| {
        let path = root.join(name);
        std::fs::create_dir_all(&path).expect("a directory");
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden.join(folder).join(name).join(file), path.join(file)).expect("a golden model");
        }
        std::fs::write(path.join("vocab.txt"), pieces[..vocabulary].join("\n") + "\n").expect("a vocabulary");
        Source { name: name.to_owned(), path }
    });
    let server = Server::new(models.collect());
    // All is in memory now.
    let _ = std::fs::remove_dir_all(&root);
    server
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| SERVER.ask(bytes));
