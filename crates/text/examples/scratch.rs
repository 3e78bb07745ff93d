use henson_text::*;
use std::path::Path;
use std::time::Instant;
fn main() {
    let mode = std::env::args().nth(1).unwrap();
    let base = Path::new("/work/shared/data/vocab");
    let names = ["bert-base-uncased", "bert-base-cased", "gpt2", "roberta-base"];
    if mode == "speed" {
        let text = std::fs::read_to_string(std::env::args().nth(2).unwrap()).unwrap();
        for n in names {
            let t = Tokenizer::open(&base.join(n)).unwrap();
            for round in 0..3 {
                let s = Instant::now();
                let mut c = 0;
                for l in text.lines() {
                    c += t.encode(l).unwrap().len();
                }
                let a = s.elapsed();
                let s = Instant::now();
                for l in text.lines() {
                    c += t.encode_ids(l).unwrap().len();
                }
                if round == 2 {
                    println!("{n}: {c} encode {:?} ids {:?} of {} MB", a, s.elapsed(), text.len() as f64 / 1e6);
                }
            }
        }
    }
    if mode == "long" {
        let t = Tokenizer::open(&base.join("gpt2")).unwrap();
        for n in [1000usize, 100_000, 900_000, 1_100_000, 3_000_000] {
            for (name, text) in [
                ("spaces", " ".repeat(n) + "x y z"),
                ("letters", "a ".repeat(n)),
                ("word", "ab".repeat(n.min(100_000))),
                ("nl", "\n ".repeat(n) + "The end is near"),
            ] {
                let s = Instant::now();
                let p = t.encode(&text).unwrap();
                let k = p.len();
                println!(
                    "{n} {name}: {} pieces, last {:?} words {:?} {:?}",
                    k,
                    &p.ids[k.saturating_sub(4)..],
                    p.words.last(),
                    s.elapsed()
                );
            }
        }
    }
    if mode == "jsonl" {
        // texts as JSON strings on stdin -> ids for gpt2
        let n = std::env::args().nth(2).unwrap();
        let t = Tokenizer::open(&base.join(&n)).unwrap();
        for l in std::io::stdin().lines() {
            let text: String = serde_json::from_str(&l.unwrap()).unwrap();
            let p = t.encode(&text).unwrap();
            println!("{}", serde_json::json!([p.ids, code_point_offsets(&text, &p.offsets)]));
        }
    }
    if mode == "save" {
        for n in names {
            Tokenizer::open(&base.join(n)).unwrap().save(Path::new(&format!("/tmp/saved/{n}")), Some(512)).unwrap();
        }
    }
}
