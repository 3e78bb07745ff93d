//! `henson convert`: a model directory in, the same model out in today's names and files.

use henson_checkpoint::{Existing, SaveDType, SaveOptions, save};
use henson_infer::{Model, Want};
use henson_tensor::{DType, Device};

use crate::flags::{Convert, SavedDType};
use crate::{models, output};

pub(crate) fn run(flags: &Convert) -> anyhow::Result<()> {
    let path = models::resolve(&flags.source, flags.download)?;
    let model = Model::open(&path, &Device::cpu(None, None)?, DType::F32, Want::AsSaved)?;
    let report = model.report();
    if !report.is_clean() {
        eprintln!("{report}");
    }
    let mut config = model.bert().config().clone();
    config.architectures = vec![model.bert().head().architecture().to_owned()];
    let files = model.tokenizer().files(Some(model.most_tokens()))?;
    let dtype = match flags.dtype {
        SavedDType::F32 => SaveDType::F32,
        SavedDType::Bf16 => SaveDType::Bf16,
        SavedDType::F16 => SaveDType::F16,
    };
    let existing = if flags.overwrite { Existing::Replace } else { Existing::Refuse };
    let options = SaveOptions { existing, ..SaveOptions::default() };
    save(&flags.destination, &files, &config.to_json()?, model.parameters(), dtype, &options)?;
    let count = model.parameters().count();
    output::line(&format!(
        "wrote {} ({}, {count} parameters) to {}",
        path.display(),
        model.bert().head().architecture(),
        flags.destination.display()
    ))
}
