//! `henson generate`: texts in, what a model writes for them out, in order.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Context;
use henson_checkpoint::write_atomic;
use henson_infer::{
    FinishReason, GenerateEvent, GenerateSettings, Generated, InferError, Model, Sampling, TokenScore, Want,
};
use serde::Serialize;

use crate::flags::generate::Generate;
use crate::{input, models, output};

/// What `--json` prints for a sequence.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_ids: Option<&'a [u32]>,
    sequence: usize,
    ids: &'a [u32],
    text: &'a str,
    score: f32,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<Token>>,
}

/// A token with its probability, and the likeliest ones.
#[derive(Serialize)]
struct Token {
    id: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

pub(crate) fn run(flags: &Generate) -> anyhow::Result<()> {
    let Some(name) = &flags.model.model else {
        anyhow::bail!("generate needs --model: the models that come with henson read texts and write none");
    };
    let out = flags.out.as_deref();
    if let Some(out) = out {
        check_out(out, flags.overwrite)?;
    }
    let device = flags.compute.device()?;
    let path = models::resolve(name, flags.model.download)?;
    let model = Model::open(&path, &device, flags.compute.dtype(), Want::Writer)?;
    let settings = settings(flags, &model)?;
    let one = flags.texts.texts.len() == 1 && settings.return_sequences == 1 && !flags.json && out.is_none();
    let mut written = Vec::new();
    input::for_each_telling(&flags.texts, |texts, numbers, told| {
        let prompt = |(text, number): (&&str, &usize)| {
            let prompt = if flags.ids { ids_of(text) } else { model.prompt(text).map_err(Into::into) };
            prompt.map_err(|error| match error.downcast::<InferError>() {
                Ok(error) => error.numbered(&[*number]).into(),
                Err(other) => other.context(format!("text {number}")),
            })
        };
        let prompts = texts.iter().zip(numbers).map(prompt).collect::<anyhow::Result<Vec<Vec<u32>>>>()?;
        let (mut shown, mut ended) = (Ok(()), 0);
        let generated = model.generate(&prompts, &settings, |event: GenerateEvent<'_>| {
            if one && io::stdout().is_terminal() {
                shown = output::part(event.text);
            }
            if event.why.is_some() {
                ended += 1;
                told(ended / settings.return_sequences);
            }
            if shown.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        shown?;
        let generated = generated.map_err(|error| error.numbered(numbers))?;
        for ((text, prompt), sequences) in texts.iter().zip(&prompts).zip(&generated) {
            for (number, sequence) in sequences.iter().enumerate() {
                print(flags, (text, prompt), (number, sequence), one, &mut written)?;
            }
        }
        Ok(())
    })?;
    let Some(out) = out else { return Ok(()) };
    write_atomic(out, &written).with_context(|| format!("cannot write {}", out.display()))
}

/// The model's settings with those that were typed. Drawing and beams exclude each other: what was typed wins.
fn settings(flags: &Generate, model: &Model) -> anyhow::Result<GenerateSettings> {
    let mut settings = model.generate_settings()?;
    let own = model.sampling_settings()?;
    let draws = [flags.temperature, flags.top_p, flags.min_p].iter().any(Option::is_some)
        || flags.top_k.is_some()
        || flags.seed.is_some();
    anyhow::ensure!(
        !draws || flags.sample != Some(false),
        "--sample=false takes the likeliest token: leave out --temperature, --top-k, --top-p, --min-p and --seed"
    );
    let typed_beams = flags.beams.is_some_and(|beams| beams > 1);
    anyhow::ensure!(
        !(typed_beams && (draws || flags.sample == Some(true))),
        "--beams follows the likeliest sequences and draws nothing: leave out --sample, --temperature, --top-k, --top-p, --min-p \
         and --seed, or --beams"
    );
    if draws || flags.sample == Some(true) {
        settings.sampling = Some(Sampling {
            temperature: flags.temperature.unwrap_or(own.temperature),
            top_k: flags.top_k.unwrap_or(own.top_k),
            top_p: flags.top_p.unwrap_or(own.top_p),
            min_p: flags.min_p.unwrap_or(own.min_p),
            seed: flags.seed.unwrap_or(own.seed),
        });
        settings.beams = 1;
    } else if typed_beams || flags.sample == Some(false) {
        settings.sampling = None;
    }
    if let Some(beams) = flags.beams {
        settings.beams = beams;
        settings.return_sequences = settings.return_sequences.min(beams);
    }
    settings.max_new_tokens = flags.max_new_tokens.or(settings.max_new_tokens);
    settings.min_new_tokens = flags.min_new_tokens.unwrap_or(settings.min_new_tokens);
    settings.length_penalty = flags.length_penalty.unwrap_or(settings.length_penalty);
    settings.early_stopping = flags.early_stopping.unwrap_or(settings.early_stopping);
    settings.repetition_penalty = flags.repetition_penalty.unwrap_or(settings.repetition_penalty);
    settings.no_repeat_ngram = flags.no_repeat_ngram.unwrap_or(settings.no_repeat_ngram);
    settings.return_sequences = flags.return_sequences.unwrap_or(settings.return_sequences);
    settings.logprobs = flags.logprobs;
    settings.stop.extend(flags.stop.iter().cloned());
    settings.check()?;
    Ok(settings)
}

fn check_out(out: &Path, overwrite: bool) -> anyhow::Result<()> {
    anyhow::ensure!(!out.is_dir(), "--out {} is a directory: expected a file in one", out.display());
    anyhow::ensure!(overwrite || !out.exists(), "{} exists: --overwrite replaces it", out.display());
    // Now, not after hours of computing.
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    anyhow::ensure!(parent.is_dir(), "cannot write {}: there is no directory {}", out.display(), parent.display());
    Ok(())
}

/// Token ids with spaces between them.
pub(crate) fn ids_of(text: &str) -> anyhow::Result<Vec<u32>> {
    let id =
        |word: &str| word.parse().with_context(|| format!("expected token ids with spaces between them, not {word:?}"));
    text.split_whitespace().map(id).collect()
}

fn print(
    flags: &Generate,
    (text, prompt): (&str, &[u32]),
    (sequence, generated): (usize, &Generated),
    one: bool,
    written: &mut Vec<u8>,
) -> anyhow::Result<()> {
    if one {
        // What was shown while it was written needs its end alone.
        return output::line(if io::stdout().is_terminal() { "" } else { &generated.text });
    }
    let mut line = String::new();
    if flags.json {
        let token =
            |token: &'_ TokenScore| Token { id: token.id, logprob: token.logprob, top: token.alternatives.clone() };
        line = serde_json::to_string(&Line {
            prompt: (!flags.ids).then_some(text),
            prompt_ids: flags.ids.then_some(prompt),
            sequence,
            ids: &generated.ids,
            text: &generated.text,
            score: generated.score,
            finish_reason: reason(generated.why),
            logprobs: flags.logprobs.map(|_| generated.tokens.iter().map(token).collect()),
        })?;
    } else {
        // One line each, so that the nth is that of the nth text.
        line.push_str(&generated.text.replace('\\', "\\\\").replace('\n', "\\n"));
    }
    if flags.out.is_none() {
        return output::line(&line);
    }
    written.extend_from_slice(line.as_bytes());
    written.push(b'\n');
    Ok(())
}

fn reason(why: FinishReason) -> &'static str {
    match why {
        FinishReason::EndOfText => "end",
        FinishReason::Length => "length",
        FinishReason::Stop => "stop",
        FinishReason::NotFinite => "error",
    }
}
