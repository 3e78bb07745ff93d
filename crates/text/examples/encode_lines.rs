//! Encodes lines for comparisons with other programs: reads one JSON string per line, writes the ids and offsets of each as
//! JSON. With `--template`, the ids are those with special tokens around them; with `--save DIR`, the tokenizer is first
//! saved to DIR and opened from there.
//!
//! ```sh
//! cargo run -p henson-text --example encode_lines -- spiece.model < lines.jsonl
//! ```

use std::error::Error;
use std::io::{BufRead, Write};
use std::path::Path;

use henson_text::Tokenizer;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).peekable();
    let path = arguments.next().ok_or("expected the path of a tokenizer")?;
    let mut tokenizer = Tokenizer::open(Path::new(&path))?;
    let mut template = false;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--template" => template = true,
            "--save" => {
                let directory = arguments.next().ok_or("--save needs a directory")?;
                tokenizer.save(Path::new(&directory), None)?;
                tokenizer = Tokenizer::open(Path::new(&directory))?;
            }
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        let pieces = tokenizer.encode(&text)?;
        let ids = match template {
            true => tokenizer.template().single(&pieces, 1 << 20)?.ids,
            false => pieces.ids.clone(),
        };
        writeln!(out, "{}", serde_json::json!({"ids": ids, "offsets": pieces.offsets}))?;
    }
    Ok(out.flush()?)
}
