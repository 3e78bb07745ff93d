//! Asks a server at a fixed rate, whether it keeps up or not, as a crowd does: what wrk cannot, whose connections wait for
//! their answers. Prints one JSON object: how many answers of each status, and how long those with 200 took.
//!
//!     cargo run --release -p henson-serve --example load -- 127.0.0.1:8080 bodies.jsonl RATE SECONDS
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a tool for the terminal")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, file, rate, seconds] = arguments.as_slice() else {
        return Err("usage: load ADDRESS BODIES.jsonl RATE SECONDS".into());
    };
    let (rate, seconds): (f64, f64) = (rate.parse()?, seconds.parse()?);
    let request = |body: &str| {
        let length = body.len();
        format!(
            "POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
    };
    let requests: Vec<Arc<str>> = std::fs::read_to_string(file)?.lines().map(|body| request(body).into()).collect();
    let results: Arc<Mutex<BTreeMap<u16, Vec<f64>>>> = Arc::default();
    let idle: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
    let (begin, mut tasks) = (Instant::now(), Vec::new());
    for i in 0..(rate * seconds) as usize {
        let due = begin + Duration::from_secs_f64(i as f64 / rate);
        tokio::time::sleep_until(due.into()).await;
        let (request, address) = (Arc::clone(&requests[i % requests.len()]), address.clone());
        let (results, idle) = (Arc::clone(&results), Arc::clone(&idle));
        tasks.push(tokio::spawn(async move {
            let known = idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let answer = ask(known, &address, &request).await;
            let milliseconds = due.elapsed().as_secs_f64() * 1e3;
            // 0 stands for a connection that broke.
            let (status, stream) = answer.map_or((0, None), |(status, stream)| (status, Some(stream)));
            results.lock().unwrap_or_else(PoisonError::into_inner).entry(status).or_default().push(milliseconds);
            idle.lock().unwrap_or_else(PoisonError::into_inner).extend(stream);
        }));
    }
    for task in tasks {
        task.await?;
    }
    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
    for times in results.values_mut() {
        times.sort_by(f64::total_cmp);
    }
    let at = |times: &Vec<f64>, share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(0.0);
    let counts: BTreeMap<String, usize> =
        results.iter().map(|(status, times)| (status.to_string(), times.len())).collect();
    let good = results.get(&200).cloned().unwrap_or_default();
    let summary = serde_json::json!({
        "rate": rate, "seconds": begin.elapsed().as_secs_f64(), "answers": counts,
        "p50_ms": at(&good, 0.5), "p99_ms": at(&good, 0.99), "max_ms": good.last(),
    });
    println!("{summary}");
    Ok(())
}

/// One request and its answer, on a connection that is there or a new one.
async fn ask(known: Option<TcpStream>, address: &str, request: &str) -> Result<(u16, TcpStream), Error> {
    let mut stream = match known {
        Some(stream) => stream,
        None => TcpStream::connect(address).await?,
    };
    stream.set_nodelay(true)?;
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::new();
    loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err("the connection ended".into());
        }
        let Some(end) = bytes.windows(4).position(|part| part == b"\r\n\r\n") else { continue };
        let head = std::str::from_utf8(&bytes[..end])?;
        let length = head
            .lines()
            .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
        let length: usize = length.ok_or("no length")?;
        if bytes.len() >= end + 4 + length {
            let status = head.split(' ').nth(1).ok_or("no status")?.parse()?;
            return Ok((status, stream));
        }
    }
}
