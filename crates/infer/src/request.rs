//! A request goes three steps. *Prepare*: texts become sequences, with what is to be read off each; that computes nothing, so
//! any thread can do it. *Run*: the sequences of many requests go through the model together ([`Model::read`]). *Finish*: what
//! was read becomes the answer.
//!
//! There is one `prepare_…` for each kind of question. [`Model::run`] does the other two steps for the commands; a server
//! batches the sequences of its clients in its own way and finishes each request by itself.

use henson_text::Features;

use crate::{InferError, Model, Output, Read, Result, batches};

/// A question to a model that was prepared, with an answer of type `A`.
pub struct Request<A> {
    /// What goes through the model.
    pub sequences: Vec<Sequence>,
    /// Pieces that were cut off because texts were too long.
    pub dropped: usize,
    /// The last step.
    pub finish: Finish<A>,
}

/// A sequence, and what is read off it.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The sequence.
    pub features: Features,
    /// What is read.
    pub read: Read,
    /// The number of its text in the request, from 1, for messages.
    pub text: usize,
}

/// Turns the sequences of a request, each with what was read off it, into the answer.
pub type Finish<A> = Box<dyn FnOnce(&Model, Vec<(Features, Output)>) -> A + Send>;

impl<A: 'static> Request<A> {
    /// A request about one text: the same is read off each of its windows.
    pub(crate) fn new(
        windows: Vec<Features>,
        read: Read,
        dropped: usize,
        finish: impl FnOnce(&Model, Vec<(Features, Output)>) -> A + Send + 'static,
    ) -> Self {
        let sequence = |features| Sequence { features, read: read.clone(), text: 1 };
        Self { sequences: windows.into_iter().map(sequence).collect(), dropped, finish: Box::new(finish) }
    }

    /// The same with another form of the answer.
    pub fn map<B>(self, change: impl FnOnce(A) -> B + Send + 'static) -> Request<B> {
        let Self { sequences, dropped, finish } = self;
        Request { sequences, dropped, finish: Box::new(|model, read| change(finish(model, read))) }
    }

    /// Several requests as one; its texts are numbered by them.
    pub fn all(requests: Vec<Self>) -> Request<Vec<A>> {
        let (mut sequences, mut dropped) = (Vec::with_capacity(requests.len()), 0);
        let mut parts = Vec::with_capacity(requests.len());
        for (text, request) in (1..).zip(requests) {
            dropped += request.dropped;
            parts.push((request.sequences.len(), request.finish));
            sequences.extend(request.sequences.into_iter().map(|sequence| Sequence { text, ..sequence }));
        }
        let finish = |model: &Model, read: Vec<(Features, Output)>| {
            let mut read = read.into_iter();
            parts.into_iter().map(|(count, finish)| finish(model, read.by_ref().take(count).collect())).collect()
        };
        Request { sequences, dropped, finish: Box::new(finish) }
    }
}

impl<A> Request<A> {
    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.features.len()).sum()
    }
}

impl Model {
    /// The answer to a request. Numbers that are not finite are an error that names their text.
    pub fn run<A>(&self, request: Request<A>) -> Result<A> {
        let Request { sequences, finish, .. } = request;
        let mut outputs = Vec::with_capacity(sequences.len());
        for range in batches::by_tokens(sequences.iter().map(|sequence| sequence.features.len())) {
            let batch = &sequences[range];
            let read: Vec<(&Features, &Read)> = batch.iter().map(|s| (&s.features, &s.read)).collect();
            for (sequence, output) in batch.iter().zip(self.read(&read)?) {
                outputs.push(output.ok_or(InferError::NotFinite { text: sequence.text })?);
            }
        }
        Ok(finish(self, sequences.into_iter().map(|sequence| sequence.features).zip(outputs).collect()))
    }

    /// The answers to the same question about several inputs.
    pub(crate) fn ask<T, A: 'static>(
        &self,
        inputs: &[T],
        prepare: impl Fn(&T) -> Result<Request<A>>,
    ) -> Result<Vec<A>> {
        let requests =
            (1..).zip(inputs).map(|(number, input)| prepare(input).map_err(|error| error.numbered(&[number])));
        self.run(Request::all(requests.collect::<Result<_>>()?))
    }
}
