//! `henson embed`.

use henson_infer::{EmbedSettings, Model, Prompts, Want};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::flags::Embed;
use crate::{input, models, output};

/// What `--json` prints for a text.
#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    embedding: &'a [f32],
    dropped: usize,
}

pub(crate) fn run(flags: &Embed) -> anyhow::Result<()> {
    let device = flags.ask.compute.device()?;
    let path = models::find(&flags.ask.model, BuiltIn::Sentences)?;
    let model = Model::open(&path, &device, flags.ask.compute.dtype(), Want::Encoder)?;
    output::warn_of_length(flags.ask.length.max_length, model.most_tokens());
    let mut settings = EmbedSettings::of_directory(&path)?;
    if let Some(pooling) = flags.pooling {
        settings.pooling = vec![pooling];
    }
    if let Some(name) = &flags.prompt_name {
        let prompts = Prompts::of_directory(&path)?;
        let found = prompts.get(Some(name)).map(str::to_owned);
        settings.prompt = found.map_err(|what| anyhow::anyhow!("--prompt-name: {what}; --prompt takes any text"))?;
    }
    if let Some(prompt) = &flags.prompt {
        settings.prompt.clone_from(prompt);
    }
    settings.normalise = flags.normalise.unwrap_or(settings.normalise);
    settings.most_tokens = flags.ask.length.max_length.or(settings.most_tokens);
    input::for_each(&flags.ask.texts, |texts, numbers| {
        if let Some(empty) = texts.iter().position(|text| text.trim().is_empty()) {
            anyhow::bail!("text {} is empty: expected a text to embed", numbers[empty]);
        }
        let embeddings = model.embed(texts, &settings, flags.ask.length.length().windows);
        let embeddings = embeddings.map_err(|error| error.numbered(numbers))?;
        output::warn_cut(numbers, embeddings.iter().map(|e| e.dropped));
        for (text, embedding) in texts.iter().zip(&embeddings) {
            if flags.ask.json {
                output::json(&Line { text, embedding: &embedding.vector, dropped: embedding.dropped })?;
            } else {
                let numbers: Vec<String> = embedding.vector.iter().map(|x| format!("{x}")).collect();
                output::line(&numbers.join(" "))?;
            }
        }
        Ok(())
    })
}
