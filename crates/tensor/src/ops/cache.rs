//! Keys and values of earlier tokens, kept from pass to pass for decoding: sequences enter, grow by a few tokens a pass, and
//! leave. Forward only.
//!
//! Memory is divided into pages of some tokens, and a sequence has as many as it needs, so nothing is moved when others come and
//! go. What a token gets depends on its own sequence alone, to the last bit.
//!
//! A fork shares the full pages of the sequence that it continues, which nobody writes again; the last page, unless it is full, is
//! copied. So a page that several sequences have is never written.

use henson_kernels::cpu::attention::cache::{Pages, append, attend};
use henson_kernels::cpu::attention::{Attention, Bias, View, Window};
use henson_kernels::cuda::attention::cache as cuda_kernels;
use henson_kernels::cuda::attention::general::Columns;
use henson_kernels::cuda::rows as cuda_rows;

use super::attention::{BiasValues, check};
use super::recurrent::RecurrentState;
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
    /// Of each page, how many sequences have it.
    shared: Vec<u32>,
    sequences: Vec<Sequence>,
    /// Places of `sequences` that nobody has.
    vacant: Vec<usize>,
    /// Counts the checks, so that a sequence can keep by which it was seen.
    checks: u64,
    /// What the pass under way works on, in the order of its sequences; of those that only fill it up, no tokens.
    selected: usize,
    pages: Vec<u32>,
    page_offsets: Vec<u32>,
    lengths: Vec<u32>,
    /// The same three lists on a GPU.
    on_gpu: Option<[Tensor; 3]>,
}

#[derive(Clone, Debug, Default)]
struct Sequence {
    pages: Vec<u32>,
    tokens: usize,
    /// Whether it is one that has not left.
    entered: bool,
    /// The last check that saw it.
    checked: u64,
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
            shared: vec![0; pages],
            sequences: vec![],
            vacant: vec![],
            checks: 0,
            selected: 0,
            pages: vec![],
            page_offsets: vec![0],
            lengths: vec![],
            on_gpu: None,
        })
    }

    /// A new sequence, without tokens.
    pub fn enter(&mut self) -> CachedSequence {
        self.place(Sequence { entered: true, ..Sequence::default() })
    }

    /// A new sequence that continues another: it has the same tokens so far, and the two go on apart. It takes a page of its own
    /// only where the last one is not full.
    pub fn fork(&mut self, sequence: CachedSequence) -> Result<CachedSequence> {
        self.check(&[sequence], true)?;
        let device = self.device.clone();
        let _turn = device.turn();
        let Sequence { mut pages, tokens, .. } = self.sequences[sequence.0].clone();
        let rest = tokens % self.page_size;
        if rest > 0 {
            let from = pages.pop().unwrap_or_default();
            let Some(to) = self.free.pop() else { return Err(self.out_of_pages(1)) };
            self.copy_page(from, to, rest)?;
            pages.push(to);
        }
        pages.iter().for_each(|page| self.shared[*page as usize] += 1);
        Ok(self.place(Sequence { pages, tokens, entered: true, checked: 0 }))
    }

    /// Forgets a sequence; the pages that no other one has serve others.
    pub fn leave(&mut self, sequence: CachedSequence) {
        let Some(left) = self.sequences.get_mut(sequence.0).filter(|sequence| sequence.entered) else { return };
        for page in std::mem::take(left).pages {
            let shared = &mut self.shared[page as usize];
            *shared -= 1;
            if *shared == 0 {
                self.free.push(page);
            }
        }
        self.vacant.push(sequence.0);
    }

    fn place(&mut self, sequence: Sequence) -> CachedSequence {
        match self.vacant.pop() {
            Some(place) => {
                self.sequences[place] = sequence;
                CachedSequence(place)
            }
            None => {
                self.sequences.push(sequence);
                CachedSequence(self.sequences.len() - 1)
            }
        }
    }

    /// Copies the first tokens of a page to another, in all layers.
    fn copy_page(&mut self, from: u32, to: u32, tokens: usize) -> Result<()> {
        let page_size = self.page_size;
        for matrix in self.layers.iter_mut().flatten() {
            let width = matrix.columns();
            let (from, to) = (from as usize * page_size * width, to as usize * page_size * width);
            match &self.device {
                Device::Cpu(_) => with_float!(matrix.dtype(), E => {
                    matrix.slice_mut::<E>().copy_within(from..from + tokens * width, to);
                }),
                Device::Cuda(cuda) => {
                    let all = matrix.on_gpu();
                    cuda.gpu.copy(all.part(from, tokens * width), all.part(to, tokens * width))?;
                }
            }
        }
        Ok(())
    }

    /// Tokens of a sequence so far: the position of its next one.
    pub fn tokens(&self, sequence: CachedSequence) -> usize {
        self.sequences.get(sequence.0).map_or(0, |sequence| sequence.tokens)
    }

    /// Pages that nobody has.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Makes room for new tokens: `layout` tells how many each of `sequences` gets in the passes' next operations, where these are
    /// [rounded](Device::rounded_streams) with further ones behind them. For sequences that only attend to what is there, use
    /// [`Cache::select`].
    pub fn extend(&mut self, sequences: &[CachedSequence], layout: &Layout) -> Result<()> {
        let rounded = self.device.rounded_streams(sequences.len());
        if layout.sequences() != rounded {
            let (expected, got) = ([rounded].into(), [layout.sequences()].into());
            return Err(TensorError::Shape { operation: "cache", what: "the layout", expected, got });
        }
        self.check(sequences, true)?;
        let counts = layout.offsets().windows(2).map(|w| (w[1] - w[0]) as usize);
        let pages_of = |tokens: usize| tokens.div_ceil(self.page_size);
        let missing = |(sequence, count): (&CachedSequence, usize)| {
            let Sequence { pages, tokens, .. } = &self.sequences[sequence.0];
            pages_of(tokens + count) - pages.len()
        };
        let needed: usize = sequences.iter().zip(counts.clone()).map(missing).sum();
        if needed > self.free.len() {
            return Err(self.out_of_pages(needed));
        }
        for (sequence, count) in sequences.iter().zip(counts) {
            let sequence = &mut self.sequences[sequence.0];
            sequence.tokens += count;
            while sequence.pages.len() * self.page_size < sequence.tokens {
                let Some(page) = self.free.pop() else { break };
                self.shared[page as usize] = 1;
                sequence.pages.push(page);
            }
        }
        self.select(sequences)
    }

    /// Names the sequences that the next operations are about. One that several queries attend to, as beams to their source, is
    /// named several times.
    pub fn select(&mut self, sequences: &[CachedSequence]) -> Result<()> {
        self.check(sequences, false)?;
        self.selected = sequences.len();
        self.pages.clear();
        self.page_offsets.truncate(1);
        self.lengths.clear();
        for sequence in sequences {
            let sequence = &self.sequences[sequence.0];
            self.pages.extend(&sequence.pages);
            self.page_offsets.push(self.pages.len() as u32);
            self.lengths.push(sequence.tokens as u32);
        }
        let rounded = self.device.rounded_streams(self.selected);
        self.page_offsets.resize(rounded + 1, self.pages.len() as u32);
        self.lengths.resize(rounded, 0);
        // Nobody has those behind the last offset.
        self.pages.resize(self.device.rounded_pages(self.pages.len(), rounded), 0);
        self.on_gpu = match &self.device {
            Device::Cpu(_) => None,
            device => {
                let list = |numbers: &[u32]| Tensor::from_slice(device, [numbers.len()], numbers);
                Some([list(&self.pages)?, list(&self.page_offsets)?, list(&self.lengths)?])
            }
        };
        Ok(())
    }

    fn check(&mut self, sequences: &[CachedSequence], once: bool) -> Result<()> {
        self.checks += 1;
        for sequence in sequences {
            let known = self.sequences.get_mut(sequence.0).filter(|sequence| sequence.entered);
            let fine =
                known.is_some_and(|known| std::mem::replace(&mut known.checked, self.checks) < self.checks || !once);
            if !fine {
                let why = "a sequence is named twice, or is not in the cache";
                return Err(TensorError::Unsupported { operation: "cache", why });
            }
        }
        Ok(())
    }

    fn out_of_pages(&self, needed: usize) -> TensorError {
        TensorError::Layout(format!(
            "the cache has {} free pages of {} tokens, and {needed} are needed: let sequences leave, or make it larger",
            self.free.len(),
            self.page_size
        ))
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

    /// The row of the last token of each sequence selected, or of the last one before those of `new`.
    fn state_rows(&self, new: Option<&Layout>) -> Vec<Option<usize>> {
        let row = |(i, length): (usize, &u32)| {
            let new = new.map_or(0, |layout| layout.offsets()[i + 1] - layout.offsets()[i]);
            let place = length.checked_sub(new + 1)? as usize;
            let page = self.pages[self.page_offsets[i] as usize + place / self.page_size] as usize;
            Some(page * self.page_size + place % self.page_size)
        };
        self.lengths.iter().enumerate().map(row).collect()
    }

    /// Whether the layout is that of the sequences selected; the tokens of which are their last ones, or those `apart`.
    fn check_layout(&self, layout: &Layout, apart: bool) -> Result<()> {
        let mut counts = layout.offsets().windows(2).map(|w| w[1] - w[0]).zip(&self.lengths).take(self.selected);
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
        self.reads(&(layer, column));
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

    /// Keeps the state of a recurrent layer (B×C, of one direction) at the last token of each sequence that the cache was extended
    /// for, in the place of keys and values.
    pub fn keep_state(&mut self, cache: &mut Cache, layer: usize, state: &RecurrentState) -> Result<()> {
        let rows = cache.state_rows(None);
        let both = [Some(&state.hidden), state.cell.as_ref()];
        for (mut to, from) in cache.layer(layer)?.clone().into_iter().zip(both) {
            let Some(from) = from.map(Var::tensor) else { continue };
            let width = to.columns();
            from.check_shape("cache", "the state", [rows.len(), width])?;
            from.check_dtype("cache", "the state", to.dtype())?;
            put_rows(self.device(), from, &rows, &mut to)?;
        }
        Ok(())
    }

    /// The state of a recurrent layer that was kept at the last token of each sequence selected, or at the last one before those of
    /// `new`; zeros where there is none. `cells`: whether it has such, as an LSTM's.
    pub fn kept_state(
        &mut self,
        cache: &Cache,
        layer: usize,
        new: Option<&Layout>,
        cells: bool,
    ) -> Result<RecurrentState> {
        if let Some(new) = new {
            cache.check_layout(new, false)?;
        }
        let rows = cache.state_rows(new);
        let read = |from: &Tensor| read_rows(self.device(), from, &rows).map(Var::without_gradient);
        let [hidden, cell] = cache.layer(layer)?;
        Ok(RecurrentState { hidden: read(hidden)?, cell: if cells { Some(read(cell)?) } else { None } })
    }

    /// [`Pass::kept_state`] before new tokens, where sequences without any before them begin with rows of `first`.
    pub fn kept_state_or(
        &mut self,
        cache: &Cache,
        layer: usize,
        new: &Layout,
        first: &RecurrentState,
    ) -> Result<RecurrentState> {
        let state = self.kept_state(cache, layer, Some(new), first.cell.is_some())?;
        let rows = cache.state_rows(Some(new));
        let chosen = |own: &Var, first: &Var| -> Result<Var> {
            let mut out = super::copy(self.device(), own.tensor())?;
            first.tensor().check_shape("cache", "the first state", out.shape())?;
            let missing: Vec<_> = rows.iter().enumerate().map(|(i, row)| row.is_none().then_some(i)).collect();
            put_rows(self.device(), first.tensor(), &missing, &mut out)?;
            Ok(Var::without_gradient(out))
        };
        let cell = match (&state.cell, &first.cell) {
            (Some(own), Some(first)) => Some(chosen(own, first)?),
            _ => None,
        };
        Ok(RecurrentState { hidden: chosen(&state.hidden, &first.hidden)?, cell })
    }

    /// Keys and values of all tokens of the sequences selected, one after the other, and how they are divided.
    pub fn cached_rows(&mut self, cache: &Cache, layer: usize) -> Result<([Var; 2], Layout)> {
        let lengths: Vec<usize> = cache.lengths.iter().map(|length| *length as usize).collect();
        let layout = Layout::new(self.device(), &lengths, 0)?;
        let page_size = cache.page_size;
        let row = |(i, place): (usize, usize)| {
            let page = cache.pages[cache.page_offsets[i] as usize + place / page_size] as usize;
            Some(page * page_size + place % page_size)
        };
        let places = lengths.iter().enumerate().flat_map(|(i, length)| (0..*length).map(move |place| (i, place)));
        let rows: Vec<Option<usize>> = places.map(row).collect();
        let read = |from: &Tensor| read_rows(self.device(), from, &rows).map(Var::without_gradient);
        let [keys, values] = cache.layer(layer)?;
        Ok(([read(keys)?, read(values)?], layout))
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
        self.reads(&(layer, attention, bias));
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
        let pairs: usize = (0..cache.selected)
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

/// Row i of what is given is row `rows[i]`; zeros where there is none.
fn read_rows(device: &Device, from: &Tensor, rows: &[Option<usize>]) -> Result<Tensor> {
    let width = from.columns();
    let mut out = Tensor::empty(device, [rows.len(), width], from.dtype())?;
    let _timer = device.timer(Kind::Rows, 0, &[&out, &out]);
    match device {
        Device::Cpu(_) => with_float!(from.dtype(), E => {
            let (out, from) = (out.slice_mut::<E>(), from.slice::<E>());
            for (row, out) in rows.iter().zip(out.chunks_exact_mut(width)) {
                match row {
                    Some(row) => out.copy_from_slice(&from[row * width..(row + 1) * width]),
                    None => out.fill(E::default()),
                }
            }
        }),
        Device::Cuda(cuda) => {
            let rows = rows_on_gpu(device, rows)?;
            cuda_rows::gather(&cuda.gpu, from.on_gpu(), width, rows.on_gpu(), out.on_gpu())?;
        }
    }
    Ok(out)
}

/// Row `rows[i]` of `to` becomes row i of `from`, where there is one.
fn put_rows(device: &Device, from: &Tensor, rows: &[Option<usize>], to: &mut Tensor) -> Result<()> {
    let width = to.columns();
    let _timer = device.timer(Kind::Rows, 0, &[from, from]);
    match device {
        Device::Cpu(_) => with_float!(to.dtype(), E => {
            let to = to.slice_mut::<E>();
            for (row, from) in rows.iter().zip(from.slice::<E>().chunks_exact(width)) {
                let Some(row) = row else { continue };
                to[row * width..(row + 1) * width].copy_from_slice(from);
            }
        }),
        Device::Cuda(cuda) => {
            let rows = rows_on_gpu(device, rows)?;
            cuda_rows::put(&cuda.gpu, from.on_gpu(), width, rows.on_gpu(), to.on_gpu())?;
        }
    }
    Ok(())
}

fn rows_on_gpu(device: &Device, rows: &[Option<usize>]) -> Result<Tensor> {
    let rows: Vec<u32> = rows.iter().map(|row| row.map_or(Device::NOWHERE, |row| row as u32)).collect();
    Tensor::from_slice(device, [rows.len()], &rows)
}
