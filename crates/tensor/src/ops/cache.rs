//! Keys and values of earlier tokens, kept from pass to pass for decoding: sequences enter, grow by a few tokens a pass, and
//! leave. Forward only.
//!
//! Memory is divided into pages of some tokens, and a sequence has as many as it needs, so nothing is moved when others come and
//! go. What a token gets depends on its own sequence alone, to the last bit.

use henson_kernels::cpu::attention::cache::{Pages, append, attend};
use henson_kernels::cpu::attention::{Attention, Bias, View, Window};
use henson_kernels::cuda::attention::cache as cuda_kernels;
use henson_kernels::cuda::attention::general::Columns;

use super::attention::{BiasValues, check};
use super::with_float;
use crate::{DType, Device, Kind, Layout, Pass, Result, Tensor, TensorError, Var};

/// The keys and values of a model's layers.
#[derive(Debug)]
pub struct Cache {
    device: Device,
    /// Of each layer, keys and values: rows of all pages × K·D.
    layers: Vec<[Tensor; 2]>,
    page_size: usize,
    free: Vec<u32>,
    sequences: Vec<Sequence>,
    /// What the pass under way works on, in the order of its sequences.
    pages: Vec<u32>,
    page_offsets: Vec<u32>,
    lengths: Vec<u32>,
    /// The same three lists on a GPU.
    on_gpu: Option<[Tensor; 3]>,
}

#[derive(Debug, Default)]
struct Sequence {
    pages: Vec<u32>,
    tokens: usize,
    /// Whether it is one that has not left.
    entered: bool,
}

/// A sequence in a [`Cache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedSequence(usize);

impl Cache {
    /// Room for `pages` pages of `page_size` tokens, for `layers` layers whose keys, and values, have `width` columns.
    pub fn new(
        device: &Device,
        dtype: DType,
        layers: usize,
        width: usize,
        (pages, page_size): (usize, usize),
    ) -> Result<Self> {
        if page_size == 0 || width == 0 || u32::try_from(pages.saturating_mul(page_size)).is_err() {
            return Err(TensorError::Layout(format!(
                "a cache of {pages} pages of {page_size} tokens with {width} columns is empty or too large"
            )));
        }
        let matrix = || Tensor::zeros(device, [pages * page_size, width], dtype);
        let layers = (0..layers).map(|_| Ok([matrix()?, matrix()?])).collect::<Result<_>>()?;
        Ok(Self {
            device: device.clone(),
            layers,
            page_size,
            // The first pages are given out first.
            free: (0..pages as u32).rev().collect(),
            sequences: vec![],
            pages: vec![],
            page_offsets: vec![0],
            lengths: vec![],
            on_gpu: None,
        })
    }

    /// A new sequence, without tokens.
    pub fn enter(&mut self) -> CachedSequence {
        let new = Sequence { entered: true, ..Sequence::default() };
        match self.sequences.iter().position(|sequence| !sequence.entered) {
            Some(place) => {
                self.sequences[place] = new;
                CachedSequence(place)
            }
            None => {
                self.sequences.push(new);
                CachedSequence(self.sequences.len() - 1)
            }
        }
    }

    /// Forgets a sequence; its pages serve others.
    pub fn leave(&mut self, sequence: CachedSequence) {
        if let Some(sequence) = self.sequences.get_mut(sequence.0) {
            self.free.append(&mut sequence.pages);
            *sequence = Sequence::default();
        }
    }

    /// Tokens of a sequence so far: the position of its next one.
    pub fn tokens(&self, sequence: CachedSequence) -> usize {
        self.sequences.get(sequence.0).map_or(0, |sequence| sequence.tokens)
    }

    /// Pages that nobody has.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Makes room for new tokens: `layout` tells how many each of `sequences` gets in the passes' next operations. For sequences
    /// that only attend to what is there, use [`Cache::select`].
    pub fn extend(&mut self, sequences: &[CachedSequence], layout: &Layout) -> Result<()> {
        if layout.sequences() != sequences.len() {
            let (expected, got) = ([sequences.len()].into(), [layout.sequences()].into());
            return Err(TensorError::Shape { operation: "cache", what: "the layout", expected, got });
        }
        self.check(sequences)?;
        let counts = layout.offsets().windows(2).map(|w| (w[1] - w[0]) as usize);
        let pages_of = |tokens: usize| tokens.div_ceil(self.page_size);
        let missing = |(sequence, count): (&CachedSequence, usize)| {
            let Sequence { pages, tokens, .. } = &self.sequences[sequence.0];
            pages_of(tokens + count) - pages.len()
        };
        let needed: usize = sequences.iter().zip(counts.clone()).map(missing).sum();
        if needed > self.free.len() {
            return Err(TensorError::Layout(format!(
                "the cache has {} free pages of {} tokens, and {needed} are needed: let sequences leave, or make it larger",
                self.free.len(),
                self.page_size
            )));
        }
        for (sequence, count) in sequences.iter().zip(counts) {
            let sequence = &mut self.sequences[sequence.0];
            sequence.tokens += count;
            while sequence.pages.len() * self.page_size < sequence.tokens {
                sequence.pages.extend(self.free.pop());
            }
        }
        self.select(sequences)
    }

    /// Names the sequences that the next operations are about.
    pub fn select(&mut self, sequences: &[CachedSequence]) -> Result<()> {
        self.check(sequences)?;
        self.pages.clear();
        self.page_offsets.truncate(1);
        self.lengths.clear();
        for sequence in sequences {
            let sequence = &self.sequences[sequence.0];
            self.pages.extend(&sequence.pages);
            self.page_offsets.push(self.pages.len() as u32);
            self.lengths.push(sequence.tokens as u32);
        }
        self.on_gpu = match &self.device {
            Device::Cpu(_) => None,
            device => {
                let list = |numbers: &[u32]| Tensor::from_slice(device, [numbers.len()], numbers);
                Some([list(&self.pages)?, list(&self.page_offsets)?, list(&self.lengths)?])
            }
        };
        Ok(())
    }

    fn check(&self, sequences: &[CachedSequence]) -> Result<()> {
        for (i, sequence) in sequences.iter().enumerate() {
            let known = self.sequences.get(sequence.0).is_some_and(|sequence| sequence.entered);
            if !known || sequences[..i].contains(sequence) {
                let why = "a sequence is named twice, or is not in the cache";
                return Err(TensorError::Unsupported { operation: "cache", why });
            }
        }
        Ok(())
    }

    fn pages(&self) -> Pages<'_> {
        let Self { page_size, pages, page_offsets, lengths, .. } = self;
        Pages { page_size: *page_size, pages, page_offsets, lengths }
    }

    fn pages_on_gpu(&self) -> Result<cuda_kernels::Pages<'_>> {
        let why = "its sequences were not selected yet: use extend or select";
        let lists = self.on_gpu.as_ref().ok_or(TensorError::Unsupported { operation: "cache", why })?;
        let [pages, page_offsets, lengths] = lists.each_ref().map(Tensor::on_gpu);
        Ok(cuda_kernels::Pages { page_size: self.page_size, pages, page_offsets, lengths })
    }

    fn layer(&self, layer: usize) -> Result<&[Tensor; 2]> {
        let (operation, what, index, end) = ("cache", "layer", layer, self.layers.len());
        self.layers.get(layer).ok_or(TensorError::Index { operation, what, index, end })
    }

    /// Whether the layout is that of the sequences selected; the tokens of which are their last ones, or those `apart`.
    fn check_layout(&self, layout: &Layout, apart: bool) -> Result<()> {
        let mut counts = layout.offsets().windows(2).map(|w| w[1] - w[0]).zip(&self.lengths);
        if layout.sequences() == self.lengths.len() && counts.all(|(new, all)| apart || new <= *all) {
            return Ok(());
        }
        let why = "the layout is not that of the sequences that the cache was extended or selected for";
        Err(TensorError::Unsupported { operation: "cache", why })
    }
}

impl Pass<'_> {
    /// Puts keys and values of new tokens, side by side from `column` on in `from` (a fused projection has the queries before
    /// them), at the ends of the sequences that the cache was extended for.
    pub fn append_to_cache(
        &mut self,
        cache: &mut Cache,
        layer: usize,
        from: &Var,
        column: usize,
        layout: &Layout,
    ) -> Result<()> {
        cache.check_layout(layout, false)?;
        let ([mut keys, mut values], x) = (cache.layer(layer)?.clone(), from.tensor());
        let width = keys.columns();
        x.check_dtype("cache", "keys and values", keys.dtype())?;
        x.check_shape("cache", "keys and values", [layout.tokens(), column + 2 * width])?;
        let _timer = self.device().timer(Kind::Rows, 0, &[x, x]);
        match self.device() {
            Device::Cpu(_) => with_float!(keys.dtype(), E => {
                let [_, key, value] = View::split(x.slice::<E>(), [column, width, width]);
                append(&cache.pages(), &key, layout.offsets(), keys.slice_mut::<E>());
                append(&cache.pages(), &value, layout.offsets(), values.slice_mut::<E>());
            }),
            Device::Cuda(cuda) => {
                let (pages, offsets) = (cache.pages_on_gpu()?, layout.offsets_on_gpu()?.on_gpu());
                let to = [keys.on_gpu(), values.on_gpu()];
                cuda_kernels::append(&cuda.gpu, pages, x.on_gpu(), column, offsets, to, width)?;
            }
        }
        Ok(())
    }

    /// What new tokens attend to among all of their sequences' tokens in the cache: N×A·D. `from` begins with the queries; the
    /// last query stands at the last token.
    pub fn attend_to_cache(
        &mut self,
        cache: &Cache,
        layer: usize,
        attention: &Attention,
        from: &Var,
        bias: &BiasValues,
        layout: &Layout,
    ) -> Result<Var> {
        if self.is_training() {
            return Err(TensorError::Unsupported { operation: "cache", why: "it has no backward" });
        }
        check(attention, self.device())?;
        bias.check(attention)?;
        // Those that see all keys may be tokens of another text, and more than there are keys.
        let apart = attention.window == Window::FULL && attention.bias == Bias::None;
        cache.check_layout(layout, apart)?;
        let ([keys, values], x) = (cache.layer(layer)?, from.tensor());
        let (h, width) = (attention.query_width(), attention.key_width());
        keys.check_shape("cache", "the layer's keys", [keys.rows(), width])?;
        x.check_dtype("cache", "the query", keys.dtype())?;
        let columns = x.columns().max(h);
        x.check_shape("cache", "the query", [layout.tokens(), columns])?;
        let mut out = Tensor::empty(self.device(), [layout.tokens(), h], x.dtype())?;
        let pairs: usize = (0..layout.sequences())
            .map(|i| {
                attention
                    .pairs(&layout.offsets()[i..i + 2], &[layout.offsets()[i], layout.offsets()[i] + cache.lengths[i]])
            })
            .sum();
        let _timer = self.device().timer(Kind::Attention, 4 * pairs * h, &[x, &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(x.dtype(), E => {
                let [query, _] = View::split(x.slice::<E>(), [h, columns - h]);
                let (keys, values, bias) = (keys.slice::<E>(), values.slice::<E>(), bias.slice(self.parameters()));
                let (offsets, pages, out) = (layout.offsets(), cache.pages(), out.slice_mut::<E>());
                attend(&cpu.kernels, attention, &query, offsets, bias, keys, values, &pages, out);
            }),
            Device::Cuda(cuda) => {
                let [query, _] = Columns::split(x.on_gpu(), [h, columns - h]);
                let counts = layout.offsets().windows(2).map(|w| (w[1] - w[0]) as usize);
                // What fills a batch up counts too.
                let filling = layout.tokens() - layout.offsets().last().map_or(0, |end| *end as usize);
                let most = counts.chain([filling]).max().unwrap_or(0);
                let (queries, offsets) = (layout.attention_table()?, (layout.offsets_on_gpu()?.on_gpu(), most));
                let bias = bias.on_gpu(self.parameters());
                let (bias, from) = (bias.as_ref().map(Tensor::on_gpu), [keys.on_gpu(), values.on_gpu()]);
                let pages = cache.pages_on_gpu()?;
                cuda_kernels::attend(&cuda.gpu, attention, query, queries, offsets, bias, from, pages, out.on_gpu())?;
            }
        }
        Ok(Var::without_gradient(out))
    }
}
