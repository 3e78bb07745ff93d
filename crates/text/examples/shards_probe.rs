#![allow(clippy::print_stdout, missing_docs)]
use std::time::Instant;
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let text = std::fs::read_to_string(std::env::args().nth(2).unwrap()).unwrap();
    let tokenizer = henson_text::Tokenizer::open(dir.as_ref()).unwrap();
    let cpu = || {
        let s = std::fs::read_to_string("/proc/self/stat").unwrap();
        let f: Vec<&str> = s.rsplit(')').next().unwrap().split_whitespace().collect();
        f[11].parse::<f64>().unwrap() / 100.0
    };
    let mut encoder = tokenizer.encoder();
    let (start, c) = (Instant::now(), cpu());
    let mut ids = Vec::new();
    let mut n = 0;
    for line in text.lines() {
        ids.clear();
        encoder.encode(line, &mut ids).unwrap();
        n += ids.len();
    }
    println!(
        "fast: {n} ids, {:.2} s wall, {:.2} s cpu, {:.1} MB/s cpu",
        start.elapsed().as_secs_f64(),
        cpu() - c,
        text.len() as f64 / 1e6 / (cpu() - c)
    );
    let (start, c) = (Instant::now(), cpu());
    let mut n = 0;
    let part: usize = text.len() / 8;
    let part = text[..part].rfind('\n').unwrap();
    for line in text[..part].lines() {
        n += tokenizer.encode_ids(line).unwrap().len();
    }
    println!(
        "slow: {n} ids, {:.2} s wall, {:.2} s cpu, {:.1} MB/s cpu",
        start.elapsed().as_secs_f64(),
        cpu() - c,
        part as f64 / 1e6 / (cpu() - c)
    );
}
