//! One update: the gradients' global norm, clipping, then AdamW, StableAdamW, LAMB, Adafactor, Adagrad or gradient descent.

use std::sync::Arc;

use henson_ranks::Ranks;
use henson_tensor::{Entry, Gradients, Method, Optimizer, Parameters, Reading, Result, Shape, Update};

/// An optimizer's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerSettings {
    /// The rule.
    pub method: Method,
    /// β₁.
    pub beta1: f64,
    /// β₂.
    pub beta2: f64,
    /// ε, outside of the root.
    pub epsilon: f64,
    /// Decoupled decay of matrices and tables.
    pub weight_decay: f64,
    /// Whether the moments are corrected for their start at zero. Google's BERT does not; fine-tuning on small sets is
    /// unstable without it (Mosbach et al. 2021), so it is the default.
    pub bias_correction: bool,
    /// What the gradients are multiplied by before they are cut and used: where the rules of a paper are for sums of losses, and losses
    /// here are means.
    pub gradient_scale: f64,
    /// What the gradients are cut to.
    pub clip: Clip,
}

/// A bound on the norm of all gradients together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// None.
    Off,
    /// Gradients are scaled so that their global norm is at most this.
    GlobalNorm(f64),
}

impl Default for OptimizerSettings {
    fn default() -> Self {
        Self {
            method: Method::AdamW,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-6,
            weight_decay: 0.01,
            bias_correction: true,
            gradient_scale: 1.0,
            clip: Clip::GlobalNorm(1.0),
        }
    }
}

/// Updates parameters step by step.
pub struct Updater {
    settings: OptimizerSettings,
    optimizer: Optimizer,
    steps: u64,
}

impl Updater {
    /// Fresh state for these parameters.
    pub fn new(settings: OptimizerSettings, parameters: &Parameters) -> Result<Self> {
        Self::with_rates(settings, parameters, |_| 1.0)
    }

    /// The same, with a factor on the learning rate for each parameter; one of 0 stays as it is.
    pub fn with_rates(
        settings: OptimizerSettings,
        parameters: &Parameters,
        rate: impl Fn(&Entry) -> f32,
    ) -> Result<Self> {
        let optimizer = Optimizer::new(settings.method, parameters, rate)?;
        Ok(Self { settings, optimizer, steps: 0 })
    }

    /// How many updates were made.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The names and shapes of what is kept of a parameter, for a checkpoint.
    pub fn kept(&self, entry: &Entry) -> Vec<(&'static str, Shape)> {
        self.optimizer.kept(entry)
    }

    /// The numbers of something that is kept, by its name.
    pub fn read(&self, entry: &Entry, name: &str) -> Result<Vec<f32>> {
        self.optimizer.read(entry, name)
    }

    /// Goes on after `steps` updates with what was kept of each parameter, which `read` gives by name.
    pub fn restore<E: From<henson_tensor::TensorError>>(
        &mut self,
        steps: u64,
        parameters: &Parameters,
        read: impl Fn(&Entry, &str) -> std::result::Result<Vec<f32>, E>,
    ) -> std::result::Result<(), E> {
        self.optimizer.make_whole(parameters)?;
        // In the order of a checkpoint's file, which is then read from its beginning to its end.
        let mut entries: Vec<&Entry> = parameters.entries().iter().collect();
        entries.sort_by_key(|entry| &entry.name);
        for entry in entries {
            for (name, _) in self.optimizer.kept(entry) {
                self.optimizer.write(entry, name, &read(entry, name)?)?;
            }
        }
        self.steps = steps;
        Ok(())
    }

    /// Shares the work with other ranks from here on; the state begins afresh.
    pub fn share(&mut self, parameters: &Parameters, ranks: Arc<Ranks>) -> Result<()> {
        self.optimizer.share(parameters, ranks)
    }

    /// After [`Updater::restore`] on rank 0: gives each rank its part, where ranks share the state. All must call it.
    pub fn distribute(&mut self, steps: u64) -> Result<()> {
        self.optimizer.distribute()?;
        self.steps = steps;
        Ok(())
    }

    /// Before [`Updater::read`] on rank 0: brings the state there. All ranks must call it.
    pub fn collect(&mut self, parameters: &Parameters) -> Result<()> {
        self.optimizer.collect(parameters)
    }

    /// Forgets what was collected.
    pub fn release(&mut self) {
        self.optimizer.release();
    }

    /// One step with this learning rate; gives the gradients' global norm before clipping. Where that is not finite, nothing
    /// is changed.
    pub fn step(&mut self, parameters: &mut Parameters, gradients: &Gradients, learning_rate: f64) -> Result<Reading> {
        let s = &self.settings;
        let clip = match s.clip {
            Clip::GlobalNorm(most) => Some(most),
            Clip::Off => None,
        };
        self.steps += 1;
        let update = Update {
            learning_rate,
            beta1: s.beta1,
            beta2: s.beta2,
            epsilon: s.epsilon,
            weight_decay: s.weight_decay,
            // Adafactor has no correction, and counts steps.
            bias_correction: (s.bias_correction || matches!(s.method, Method::Adafactor(_))).then_some(self.steps),
            gradient_scale: s.gradient_scale,
        };
        self.optimizer.step(parameters, gradients, &update, clip)
    }
}
