//! `henson tokenizer`: a vocabulary out of text, and what it does to texts.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use henson_checkpoint::{CheckpointError, Existing, save_files};
use henson_data::{Format, Lines};
use henson_text::{
    Kind, Pieces, Regularisation, SpecialSet, TrainingKind, TrainingProgress, TrainingReport, TrainingSettings,
    code_point_offsets, train,
};
use serde::Serialize;
use serde_json::Value;

use crate::built_in::BuiltIn;
use crate::flags::tokenizer::{
    Tokenizer, TokenizerAction, TokenizerEncode, TokenizerExtend, TokenizerInfo, TokenizerKind, TokenizerSpecials,
    TokenizerTrain,
};
use crate::output::{self, Progress};
use crate::{input, models};

pub(crate) fn run(flags: &Tokenizer) -> anyhow::Result<()> {
    match &flags.action {
        TokenizerAction::Train(flags) => run_train(flags),
        TokenizerAction::Encode(flags) => run_encode(flags),
        TokenizerAction::Info(flags) => run_info(flags),
        TokenizerAction::Extend(flags) => run_extend(flags),
    }
}

/// What replacing an old tokenizer may delete.
const TOKENIZER_FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spm.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
];

/// What `--json` prints after training.
#[derive(Serialize)]
struct Summary<'a> {
    out: &'a Path,
    kind: &'static str,
    vocabulary_size: usize,
    asked: usize,
    bytes: u64,
    lines: u64,
    words: u64,
    distinct_words: usize,
    dropped_words: u64,
    characters: usize,
    dropped_characters: usize,
    seconds: f64,
}

fn run_train(flags: &TokenizerTrain) -> anyhow::Result<()> {
    let start = Instant::now();
    check_destination(&flags.out, flags.overwrite)?;
    let (kind, name) = match flags.kind {
        TokenizerKind::WordPiece => (TrainingKind::WordPiece, "wordpiece"),
        TokenizerKind::Bpe => (TrainingKind::Bpe, "bpe"),
        TokenizerKind::ByteBpe => (TrainingKind::ByteBpe, "byte-bpe"),
        TokenizerKind::Unigram => (TrainingKind::Unigram, "unigram"),
    };
    let own = TrainingSettings::new(kind, flags.vocab_size);
    let settings = TrainingSettings {
        specials: match flags.specials {
            None => own.specials,
            Some(TokenizerSpecials::Bert) => SpecialSet::Bert,
            Some(TokenizerSpecials::Roberta) => SpecialSet::Roberta,
            Some(TokenizerSpecials::Gpt2) => SpecialSet::EndOfText,
            Some(TokenizerSpecials::T5) => SpecialSet::Ended,
            Some(TokenizerSpecials::XlNet) => SpecialSet::XlNet,
        },
        sentinels: flags.sentinels,
        lowercase: !flags.cased && kind != TrainingKind::ByteBpe,
        min_frequency: flags.min_frequency as u64,
        alphabet_limit: flags.alphabet,
        distinct_limit: flags.max_words,
        threads: flags.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
        ..own
    };
    let blocks = Blocks::new(&flags.files, flags.field.as_deref())?;
    let mut reading = Progress::new("MB read", None);
    let mut learning = Progress::new("tokens", Some(flags.vocab_size as u64));
    let mut show = |progress| {
        match progress {
            TrainingProgress::Reading { bytes } => reading.at(bytes, (bytes >> 20) as usize),
            TrainingProgress::Learning { done, .. } => {
                reading.finish();
                learning.at(done as u64, done);
            }
        }
        ControlFlow::Continue(())
    };
    let trained = train(&settings, blocks, &mut show)?;
    reading.finish();
    learning.finish();
    let report = &trained.report;
    warn_about(report, flags);
    let existing = if flags.overwrite { Existing::Replace } else { Existing::Refuse };
    save_files(&flags.out, &trained.tokenizer.files(flags.max_length)?, existing, &TOKENIZER_FILES)?;

    let seconds = start.elapsed().as_secs_f64();
    if flags.json {
        return output::json(&Summary {
            out: &flags.out,
            kind: name,
            vocabulary_size: report.vocabulary_size,
            asked: flags.vocab_size,
            bytes: report.bytes,
            lines: report.lines,
            words: report.words,
            distinct_words: report.distinct_words,
            dropped_words: report.dropped_words,
            characters: report.characters,
            dropped_characters: report.dropped_characters,
            seconds,
        });
    }
    output::line(&format!(
        "wrote a {name} tokenizer of {} tokens to {}: from {:.1} MB with {} words, {} different, in {seconds:.1} s",
        report.vocabulary_size,
        flags.out.display(),
        report.bytes as f64 / 1e6,
        report.words,
        report.distinct_words,
    ))
}

/// Refused before the work rather than after it; saving checks once more.
fn check_destination(out: &Path, overwrite: bool) -> anyhow::Result<()> {
    if let Some(name) = ["config.json", "model.safetensors"].into_iter().find(|name| out.join(name).exists()) {
        anyhow::bail!(
            "{} has a {name}: it is a model's directory, and another tokenizer would not fit that model; choose another",
            out.display()
        );
    }
    let occupied = out.read_dir().is_ok_and(|mut entries| entries.next().is_some());
    if occupied && !overwrite {
        return Err(CheckpointError::Exists { path: out.to_owned() }.into());
    }
    Ok(())
}

fn run_extend(flags: &TokenizerExtend) -> anyhow::Result<()> {
    check_destination(&flags.out, flags.overwrite)?;
    let old = henson_text::Tokenizer::open(&models::find(&flags.model, BuiltIn::General)?)?;
    let mut lines = input::Lines::open(Some(&flags.pieces))?;
    let mut pieces = Vec::new();
    while let Some(line) = lines.next_line()? {
        pieces.extend(Some(line.trim().to_owned()).filter(|line| !line.is_empty()));
    }
    anyhow::ensure!(!pieces.is_empty(), "{} has no tokens: expected one per line", lines.name);
    let new = old.extended(&pieces).with_context(|| format!("in {}", lines.name))?;
    let added = new.vocabulary_size() - old.vocabulary_size();
    let existing = if flags.overwrite { Existing::Replace } else { Existing::Refuse };
    save_files(&flags.out, &new.files(old.max_length())?, existing, &TOKENIZER_FILES)?;
    output::line(&format!(
        "wrote a tokenizer of {} tokens to {}: {added} new ones, {} existed already",
        new.vocabulary_size(),
        flags.out.display(),
        pieces.len() - added
    ))
}

fn warn_about(report: &TrainingReport, flags: &TokenizerTrain) {
    if report.vocabulary_size < flags.vocab_size {
        output::warn(&format!(
            "the text gives only {} tokens, not {}: more text, or a lower --min-frequency, would give more",
            report.vocabulary_size, flags.vocab_size
        ));
    }
    if report.dropped_words > 0 {
        output::warn(&format!(
            "{} words of the rarest kinds were dropped to hold no more than {} different ones; --max-words raises that",
            report.dropped_words, flags.max_words
        ));
    }
    if report.dropped_characters > 0 {
        output::warn(&format!(
            "{} of {} different characters are not in the alphabet and become the unknown token; --alphabet raises that",
            report.dropped_characters, report.characters
        ));
    }
}

/// What `--json` prints for a text. Offsets are in characters.
#[derive(Serialize)]
struct Encoded<'a> {
    text: &'a str,
    pieces: &'a [String],
    ids: &'a [u32],
    offsets: &'a [(usize, usize)],
    words: &'a [Option<u32>],
}

fn run_encode(flags: &TokenizerEncode) -> anyhow::Result<()> {
    let tokenizer = henson_text::Tokenizer::open(&models::find_tokenizer(&flags.model)?)?;
    let regularisation = match (flags.dropout, flags.alpha) {
        (Some(probability), _) => Regularisation::Dropout { probability },
        (_, Some(alpha)) => Regularisation::Sampling { alpha },
        _ if tokenizer.kind() == Kind::Unigram => Regularisation::Sampling { alpha: 0.2 },
        _ => Regularisation::Dropout { probability: 0.1 },
    };
    let sampler = flags.sample.map(|seed| tokenizer.sampler(seed, regularisation)).transpose()?;
    input::for_each(&flags.texts, |texts, numbers| {
        for (number, text) in numbers.iter().zip(texts) {
            let pieces = match &sampler {
                Some(sampler) => sampler.encode(text, *number as u64 - 1)?,
                None => tokenizer.encode(text)?,
            };
            print_pieces(text, &pieces, &tokenizer, flags.json)?;
        }
        Ok(())
    })
}

fn print_pieces(text: &str, pieces: &Pieces, tokenizer: &henson_text::Tokenizer, as_json: bool) -> anyhow::Result<()> {
    let texts: Vec<String> = pieces.ids.iter().map(|&id| tokenizer.token(id).unwrap_or_default()).collect();
    let offsets = code_point_offsets(text, &pieces.offsets);
    if as_json {
        let (ids, words) = (&pieces.ids, &pieces.words);
        return output::json(&Encoded { text, pieces: &texts, ids, offsets: &offsets, words });
    }
    output::line(text)?;
    for (((piece, id), bytes), (start, end)) in texts.iter().zip(&pieces.ids).zip(&pieces.offsets).zip(offsets) {
        output::line(&format!("    {piece:<20} {id:>7}   {start:>5} to {end:<5} {:?}", &text[bytes.0..bytes.1]))?;
    }
    Ok(())
}

/// What a tokenizer is.
#[derive(Serialize)]
struct Facts<'a> {
    model: &'a str,
    kind: &'static str,
    vocabulary_size: usize,
    lowercase: Option<bool>,
    max_length: Option<usize>,
    special_tokens: BTreeMap<&'static str, SpecialFact<'a>>,
    longest_pieces: Vec<String>,
    text: Option<Fit>,
}

#[derive(Serialize)]
struct SpecialFact<'a> {
    token: &'a str,
    id: u32,
}

/// How well it fits a text.
#[derive(Serialize)]
struct Fit {
    bytes: u64,
    lines: u64,
    words: u64,
    pieces: u64,
    pieces_per_word: f64,
    characters_per_piece: f64,
    /// The share of words that are one piece.
    whole_words: f64,
    /// The share of characters, white space aside, that are written in known pieces.
    coverage: f64,
    unknown_pieces: u64,
    unknown_rate: f64,
    /// What became unknown most often.
    most_unknown: Vec<(String, u64)>,
    /// How many tokens of the vocabulary the text needs.
    tokens_used: usize,
}

/// How many of the longest pieces, and of the most frequent unknown ones, are shown.
const SHOWN: usize = 10;

fn run_info(flags: &TokenizerInfo) -> anyhow::Result<()> {
    let tokenizer = henson_text::Tokenizer::open(&models::find_tokenizer(&flags.model)?)?;
    let kind = match tokenizer.kind() {
        Kind::WordPiece => "wordpiece",
        // The letter that stands for a space.
        Kind::BytePair if tokenizer.id("\u{120}").is_some() => "byte-bpe",
        Kind::BytePair => "bpe",
        Kind::Unigram => "unigram",
        Kind::WordLevel => "words",
    };
    let special = tokenizer.special().by_role();
    let facts = Facts {
        model: flags.model.shown(),
        kind,
        vocabulary_size: tokenizer.vocabulary_size(),
        lowercase: tokenizer.lowercase(),
        max_length: tokenizer.max_length(),
        special_tokens: special.map(|(role, s)| (role, SpecialFact { token: &s.text, id: s.id })).collect(),
        longest_pieces: longest_pieces(&tokenizer),
        text: match flags.files.is_empty() {
            true => None,
            false => Some(fit(&tokenizer, Blocks::new(&flags.files, flags.field.as_deref())?)?),
        },
    };
    if flags.json { output::json(&facts) } else { facts.print() }
}

fn longest_pieces(tokenizer: &henson_text::Tokenizer) -> Vec<String> {
    let ids = 0..tokenizer.vocabulary_size() as u32;
    let mut pieces: Vec<String> =
        ids.filter(|&id| !tokenizer.is_special(id)).filter_map(|id| tokenizer.token(id)).collect();
    pieces.sort_by_cached_key(|piece| (std::cmp::Reverse(piece.chars().count()), piece.clone()));
    pieces.truncate(SHOWN);
    pieces
}

fn fit(tokenizer: &henson_text::Tokenizer, blocks: Blocks<'_>) -> anyhow::Result<Fit> {
    /// Beyond so many different unknown texts, new ones are not told apart any more.
    const MOST_UNKNOWN: usize = 100_000;
    let unknown = tokenizer.special().unk.as_ref().map(|special| special.id);
    let (mut bytes, mut lines, mut words, mut pieces) = (0, 0, 0_u64, 0_u64);
    let (mut whole, mut unknown_pieces, mut characters, mut unknown_characters) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut unknown_texts: HashMap<String, u64> = HashMap::new();
    let mut used = vec![false; tokenizer.vocabulary_size()];
    let mut progress = Progress::new("MB", None);
    let solid = |text: &str| text.chars().filter(|character| !character.is_whitespace()).count() as u64;
    for block in blocks {
        let block = block?;
        for line in block.lines() {
            let cut = tokenizer.encode(line)?;
            bytes += line.len() as u64 + 1;
            lines += 1;
            pieces += cut.len() as u64;
            characters += solid(line);
            for (&id, &(start, end)) in cut.ids.iter().zip(&cut.offsets) {
                used[id as usize] = true;
                if Some(id) == unknown {
                    unknown_pieces += 1;
                    unknown_characters += solid(&line[start..end]);
                    if let Some(count) = unknown_texts.get_mut(&line[start..end]) {
                        *count += 1;
                    } else if unknown_texts.len() < MOST_UNKNOWN {
                        unknown_texts.insert(line[start..end].to_owned(), 1);
                    }
                }
            }
            let mut first = 0;
            for word in cut.words.chunk_by(|a, b| a == b) {
                words += 1;
                whole += u64::from(word.len() == 1 && Some(cut.ids[first]) != unknown);
                first += word.len();
            }
        }
        progress.at(bytes, (bytes >> 20) as usize);
    }
    progress.finish();
    anyhow::ensure!(words > 0, "the text has no words: are these the right files?");
    let share = |part: u64, of: u64| part as f64 / of.max(1) as f64;
    let mut most_unknown: Vec<(String, u64)> = unknown_texts.into_iter().collect();
    most_unknown.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    most_unknown.truncate(SHOWN);
    Ok(Fit {
        bytes,
        lines,
        words,
        pieces,
        pieces_per_word: share(pieces, words),
        characters_per_piece: share(characters, pieces),
        whole_words: share(whole, words),
        coverage: 1.0 - share(unknown_characters, characters),
        unknown_pieces,
        unknown_rate: share(unknown_pieces, pieces),
        most_unknown,
        tokens_used: used.iter().filter(|&&used| used).count(),
    })
}

impl Facts<'_> {
    fn print(&self) -> anyhow::Result<()> {
        let line = |name: &str, value: String| output::line(&format!("{name:<22}{value}"));
        line("kind", self.kind.to_owned())?;
        line("vocabulary", format!("{} tokens", self.vocabulary_size))?;
        let case = match self.lowercase {
            Some(true) => "lower-cased",
            Some(false) => "kept",
            None => "depends on its character table",
        };
        line("case", case.to_owned())?;
        line(
            "longest sequence",
            self.max_length.map_or("not limited by its files".to_owned(), |most| format!("{most} tokens")),
        )?;
        let special = self.special_tokens.iter().map(|(role, s)| {
            let role = role.strip_suffix("_token").unwrap_or(role);
            format!("{role} {} ({})", s.token, s.id)
        });
        line("special tokens", special.collect::<Vec<_>>().join(", "))?;
        line("longest tokens", self.longest_pieces.join(" "))?;
        let Some(text) = &self.text else { return Ok(()) };
        output::line("")?;
        line("text", format!("{:.1} MB, {} lines", text.bytes as f64 / 1e6, text.lines))?;
        line("words", format!("{}, {:.2}% of them one token", text.words, 100.0 * text.whole_words))?;
        line("tokens", format!("{}, {:.3} per word", text.pieces, text.pieces_per_word))?;
        line("characters per token", format!("{:.2}, white space aside", text.characters_per_piece))?;
        line("characters known", format!("{:.4}%", 100.0 * text.coverage))?;
        line("unknown tokens", format!("{}, {:.4}% of all", text.unknown_pieces, 100.0 * text.unknown_rate))?;
        if !text.most_unknown.is_empty() {
            let shown = text.most_unknown.iter().map(|(what, count)| {
                let start: String = what.chars().take(20).collect();
                format!("{start:?} {count}")
            });
            line("most often unknown", shown.collect::<Vec<_>>().join(", "))?;
        }
        line("tokens used", format!("{} of {}", text.tokens_used, self.vocabulary_size))
    }
}

/// The longest line that is taken.
const LONGEST: usize = 64 << 20;

/// Lines are handed on in blocks of about this size.
const BLOCK: usize = 1 << 20;

/// The lines of files, some at a time.
struct Blocks<'a> {
    /// With the key of the text, where lines are JSON objects.
    files: std::vec::IntoIter<(&'a Path, Option<&'a str>)>,
    current: Option<(Lines, Option<&'a str>)>,
}

impl<'a> Blocks<'a> {
    /// `field` says that all files are JSON lines; without it, their names say what they are.
    fn new(files: &'a [PathBuf], field: Option<&'a str>) -> anyhow::Result<Self> {
        let key = |path: &'a PathBuf| Ok((path.as_path(), if field.is_some() { field } else { key_of_name(path)? }));
        let files: Vec<_> = files.iter().map(key).collect::<anyhow::Result<_>>()?;
        Ok(Self { files: files.into_iter(), current: None })
    }

    fn next_block(&mut self) -> anyhow::Result<Option<String>> {
        let mut block = String::new();
        while block.len() < BLOCK {
            let (lines, key) = match &mut self.current {
                Some(current) => current,
                None => match self.files.next() {
                    Some((path, key)) => self.current.insert((Lines::open(path)?, key)),
                    None => break,
                },
            };
            match (lines.next_text(LONGEST)?, key) {
                (None, _) => self.current = None,
                (Some(line), None) => {
                    block.push_str(line);
                    block.push('\n');
                }
                (Some(line), Some(_)) if line.trim().is_empty() => {}
                (Some(line), Some(key)) => {
                    let text = text_of(line, key);
                    block.push_str(&text.with_context(|| lines.place())?);
                    block.push('\n');
                }
            }
        }
        Ok((!block.is_empty()).then_some(block))
    }
}

impl Iterator for Blocks<'_> {
    type Item = anyhow::Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_block().transpose()
    }
}

/// The key of the text in a file whose name says that it holds JSON lines; none for text. The rules are those of `data
/// build`, so that a vocabulary is made of what a corpus is made of.
fn key_of_name(path: &Path) -> anyhow::Result<Option<&'static str>> {
    let next = "write the texts alone into a file, one per line or as JSON lines";
    match Format::of(path) {
        Some(Format::JsonLines) => Ok(Some("text")),
        Some(Format::Parquet) => anyhow::bail!("{} is parquet, which is not read here: {next}", path.display()),
        None if Format::is_other_table(path) => anyhow::bail!(
            "{} is a table, whose cells would all be read as text: {next}; on standard input (-) it is read as it is",
            path.display()
        ),
        Some(Format::Text) | None => Ok(None),
    }
}

/// The text of a JSON object.
fn text_of(line: &str, field: &str) -> anyhow::Result<String> {
    let mut value: Value = serde_json::from_str(line).context("not a JSON object")?;
    match value.get_mut(field).map(Value::take) {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Null) => Ok(String::new()),
        Some(other) => anyhow::bail!("expected a text under {field:?}, got {other}"),
        None => {
            let names: Vec<&str> = value.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
            anyhow::bail!("no {field:?} in it; it has: {}; --field names the text", names.join(", "))
        }
    }
}
