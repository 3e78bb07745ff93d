//! `henson distil`: teachers and a student in, a smaller model out. A fine-tuning run with teachers in its recipe; for masked LM, a
//! pre-training run.

use henson_models::Family;
use henson_tasks::{FineTuneRecipe, Paths};

use super::{recipe, run_recipe};
use crate::commands::pretrain;
use crate::flags::distil::{Distil, MLM};
use crate::flags::finetune::Finetune;
use crate::flags::pretrain::Pretrain;
use crate::launch::{self, Started, Together};
use crate::{models, output};

pub(crate) fn run(flags: &Distil) -> anyhow::Result<()> {
    match launch::start(&flags.finetune.together, &flags.finetune.machine)? {
        Started::Alone => learn(flags, None),
        Started::Together(together) => {
            let ended = learn(flags, Some(&together));
            together.end(ended)
        }
    }
}

fn learn(flags: &Distil, together: Option<&Together>) -> anyhow::Result<()> {
    let own = &flags.finetune;
    output::check_directory(&own.out)?;
    if own.task.as_deref() == Some(MLM) {
        return pretrain::run_with(&as_pretraining(flags)?, Some(&mlm_teacher(flags)?), together);
    }
    run_recipe(own, recipe(own, Some(flags))?, together)
}

/// The directory of the one teacher that pre-training takes.
fn mlm_teacher(flags: &Distil) -> anyhow::Result<String> {
    let [teacher] = &flags.teacher[..] else {
        anyhow::bail!("--task mlm takes one --teacher, and {} were given", flags.teacher.len());
    };
    Ok(models::resolve(teacher, flags.finetune.download)?.display().to_string())
}

/// The flags of `pretrain` that mean the same; those that have no meaning there are refused.
fn as_pretraining(flags: &Distil) -> anyhow::Result<Pretrain> {
    let own = &flags.finetune;
    let refused = [
        ("--train", !own.train.is_empty()),
        ("--dev", own.dev.is_some()),
        ("--transfer", !flags.transfer.is_empty()),
        ("--cache", flags.cache.is_some()),
        ("--tokenizer", own.tokenizer.is_some()),
        ("--folds", own.folds.is_some()),
        ("--metric", own.metric.is_some()),
        ("--restarts", own.restarts.is_some()),
        ("--grid", own.grid.is_some()),
        ("--mistakes", own.mistakes.is_some()),
        ("--frozen", own.frozen),
    ];
    if let Some((flag, _)) = refused.into_iter().find(|(_, given)| *given) {
        anyhow::bail!(
            "{flag} does not apply to --task mlm, which reads the shards of --data DIR (`henson data build`)"
        );
    }
    Ok(Pretrain {
        recipe: own.recipe.clone(),
        out: Some(own.out.clone()),
        model: own.model.clone(),
        data: own.data.as_ref().map(|data| data.display().to_string()),
        settings: own.settings.clone(),
        seed: own.seed,
        dry_run: false,
        samples_in_report: false,
        stop_at: own.stop_at,
        loader_threads: 1,
        matmul_choices: None,
        json: own.json,
        dtype: own.dtype,
        machine: own.machine.clone(),
        together: own.together.clone(),
    })
}

/// Puts the teachers into a recipe, over what it has.
pub(super) fn add_teachers(recipe: &mut FineTuneRecipe, flags: &Finetune, teachers: &Distil) -> anyhow::Result<()> {
    let distil = recipe.distil.get_or_insert_default();
    if !teachers.teacher.is_empty() {
        distil.teachers.clone_from(&teachers.teacher);
    }
    if !teachers.transfer.is_empty() {
        distil.transfer = Paths(teachers.transfer.clone());
    }
    if let Some(cache) = &teachers.cache {
        distil.cache = cache.display().to_string();
    }
    anyhow::ensure!(!distil.teachers.is_empty(), "--teacher is missing: the directory of a model to learn from");
    let find = |name: &String| models::resolve(name, flags.download);
    recipe.teachers_at = distil.teachers.iter().map(find).collect::<anyhow::Result<_>>()?;
    let student = flags.model.as_ref().unwrap_or(&recipe.model);
    let is_size = Family::config_of_size(student).is_ok() && !std::path::Path::new(student).exists();
    if is_size && recipe.tokenizer.is_empty() {
        recipe.tokenizer = recipe.teachers_at[0].display().to_string();
    }
    Ok(())
}
