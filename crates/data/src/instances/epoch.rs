//! All instances of one epoch by number, without a list of them.

use std::ops::Range;
use std::sync::Arc;

use henson_kernels::philox::Stream;
use henson_kernels::threads::in_threads;
use henson_text::Slot;

use super::draws::{self, Coins, Copy, Permutation, Purpose};
use super::masks::Scratch;
use super::walk::{Chunk, Consecutive, Cursor, Second, Walk, read_sentences, sentence_starts};
use super::{Corruption, GROUP, Instance, Instances, Predicted};
use crate::{DataError, Document, Reader};

/// How much work may lie between two marks: chunks and sentences. An instance is found with half of it on average,
/// which takes about a microsecond; marks then need one byte for some ten sentences.
const BETWEEN_MARKS: usize = 512;

/// One epoch: so many instances, each by its number.
#[derive(Debug)]
pub struct Epoch {
    instances: Arc<Instances>,
    keys: Keys,
    count: u64,
    /// How many copies of documents there are.
    entries: u64,
    /// Ascending; empty where unit i is instance i.
    marks: Vec<Mark>,
    /// Whether entry i is document i.
    plain: bool,
    order: Permutation,
}

/// The keys of this epoch's draws.
#[derive(Debug)]
struct Keys {
    copies: u64,
    walk: u64,
    second: u64,
    truncation: u64,
    masks: u64,
}

/// A place in the walk over all documents: how many instances and entries (copies of documents) come before it.
#[derive(Clone, Copy, Debug)]
struct Mark {
    instance: u64,
    entry: u64,
    at: Copy,
    cursor: Cursor,
}

/// What was counted in 64 units.
#[derive(Debug)]
struct Group {
    /// Counted from the beginning of the group.
    marks: Vec<Mark>,
    instances: u64,
    entries: u64,
    /// Units that come at all.
    units: u64,
}

/// The chunk that becomes an instance, and whose it is. A sequence of a row has no document.
struct Found {
    at: Copy,
    entry: u64,
    chunk: Option<(Document, Chunk)>,
}

impl Found {
    /// The number of the chunk in its document.
    fn number(&self) -> u32 {
        self.chunk.as_ref().map_or(0, |(_, chunk)| chunk.number)
    }
}

/// What a thread makes instances with: its way to the documents, and memory that is used again.
#[derive(Debug)]
pub(crate) struct Maker<'a> {
    reader: Reader<'a>,
    scratch: Scratch,
}

impl<'a> Maker<'a> {
    pub(crate) fn new(instances: &'a Instances) -> Self {
        Self { reader: instances.corpus.reader(), scratch: Scratch::default() }
    }
}

impl Epoch {
    pub(super) fn new(instances: &Arc<Instances>, epoch: u64, threads: usize) -> Result<Self, DataError> {
        let seed = instances.seed;
        // Static masking: the same draws again and again, in another order.
        let drawn = match instances.settings.dupe_factor {
            0 => epoch,
            n => epoch % u64::from(n),
        };
        let key = |purpose| draws::key(seed, drawn, purpose);
        let keys = Keys {
            copies: key(Purpose::Copies),
            walk: key(Purpose::Walk),
            second: key(Purpose::Second),
            truncation: key(Purpose::Truncation),
            masks: key(Purpose::Masks),
        };
        let order = Permutation::new(0, 0);
        let mut this =
            Self { instances: instances.clone(), keys, count: 0, entries: 0, marks: vec![], plain: false, order };
        if instances.row.is_some() && instances.weights.are_one() {
            this.count = instances.units() as u64;
        } else {
            let mut units = 0;
            for group in this.count_groups(threads)? {
                let (instances, entries) = (this.count, this.entries);
                let moved =
                    |mark: Mark| Mark { instance: instances + mark.instance, entry: entries + mark.entry, ..mark };
                this.marks.extend(group.marks.into_iter().map(moved));
                this.count += group.instances;
                this.entries += group.entries;
                units += group.units;
            }
            this.plain = instances.weights.are_one() && this.entries == instances.corpus.documents() as u64;
            let needed = instances.cut.documents_needed() as u64;
            if units < needed {
                return Err(DataError::EpochTooSmall { epoch, documents: units, needed });
            }
        }
        if this.count == 0 {
            return Err(DataError::NothingFits { room: instances.room });
        }
        this.order = Permutation::new(draws::key(seed, epoch, Purpose::Order), this.count);
        Ok(this)
    }

    /// How many instances there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// An instance by its number in the epoch's random order.
    ///
    /// # Panics
    /// Where `index` is not below [`Epoch::count`].
    pub fn get(&self, index: u64) -> Result<Instance, DataError> {
        self.make(index, &mut Maker::new(&self.instances))
    }

    /// An instance by its number in the order of the documents.
    ///
    /// # Panics
    /// Where `index` is not below [`Epoch::count`].
    pub fn in_order(&self, index: u64) -> Result<Instance, DataError> {
        self.make_in_order(index, &mut Maker::new(&self.instances))
    }

    pub(crate) fn make(&self, index: u64, maker: &mut Maker<'_>) -> Result<Instance, DataError> {
        assert!(index < self.count, "instance {index} of {}", self.count);
        self.make_in_order(self.order.at(index), maker)
    }

    fn make_in_order(&self, index: u64, Maker { reader, scratch }: &mut Maker<'_>) -> Result<Instance, DataError> {
        assert!(index < self.count, "instance {index} of {}", self.count);
        let found = self.find(index, reader)?;
        let Instances { settings, corpus, template, corruption, .. } = &*self.instances;
        // Where sentences begin in the text, if that is asked for.
        let mut sentences = matches!(corruption, Corruption::Noise(..)).then(Vec::new);
        let mut instance = match &found.chunk {
            Some((document, chunk)) => self.of_chunk(&found, document, chunk, reader, sentences.as_mut())?,
            None => self.of_row(found.at.unit, reader, sentences.as_mut())?,
        };
        let mut draws = draws::of_chunk(self.keys.masks, found.at, found.number());
        match corruption {
            Corruption::Masks(masks) => {
                let anywhere = &mut |draws: &mut Stream| reader.piece(draws::below(draws, corpus.pieces()));
                instance.predicted =
                    masks.hide(settings, corpus.vocabulary(), &mut draws, &mut instance.ids, scratch, anywhere)?;
            }
            Corruption::Order(orders) => {
                let order = orders.draw(settings, corpus.vocabulary(), &mut draws, &instance.ids);
                (instance.orders, instance.predicted) = (Some(order.orders), order.predicted);
            }
            Corruption::None => {
                let next = (0..).zip(instance.ids.iter().skip(1));
                instance.predicted = next.map(|(position, target)| Predicted { position, target: *target }).collect();
            }
            Corruption::Spans(spans) => {
                let (source, target) = spans.corrupt(settings, &mut draws, &instance.ids);
                instance.segments = vec![0; source.len()];
                (instance.ids, instance.target) = (source, Some(target));
            }
            Corruption::Noise(noise, masks) => {
                let before = template.single_slots().iter().take_while(|slot| matches!(slot, Slot::Special { .. }));
                let (before, specials) = (before.count(), template.single_specials());
                let text = before..instance.ids.len() + before - specials;
                let most = settings.sequence_length - specials;
                // What stands before the first sentence that begins here goes on with one.
                let sentences = sentences.unwrap_or_default();
                let text = (&instance.ids[text], &sentences[..]);
                let spoiled = noise.spoil(masks, settings.mean_span, &mut draws, text, most);
                let slots = template.single_slots();
                let laid_out = lay_out(slots, settings.sequence_length, |_, ids| {
                    ids.extend_from_slice(&spoiled);
                    Ok(())
                })?;
                instance.target = Some(std::mem::replace(&mut instance.ids, laid_out.0));
                instance.segments = laid_out.1;
            }
        }
        Ok(instance)
    }

    /// One or two segments of documents, with nothing hidden.
    fn of_chunk(
        &self,
        found: &Found,
        document: &Document,
        chunk: &Chunk,
        reader: &mut Reader<'_>,
        sentences: Option<&mut Vec<usize>>,
    ) -> Result<Instance, DataError> {
        let Instances { settings, rules, ends, .. } = &*self.instances;
        let mut first = chunk.first.clone();
        let (mut second_document, mut second, mut random_document) = (*document, 0..0, None);
        let next_sentence = match &chunk.second {
            Second::None => None,
            Second::Next(next) => {
                second = next.clone();
                Some(0)
            }
            Second::Swapped(next) => {
                (first, second) = (next.clone(), first);
                Some(1)
            }
            Second::Random { target } => {
                let number;
                (number, second_document, second) =
                    self.random_second(found, target.saturating_sub(first.len()), reader)?;
                random_document = Some(number);
                Some(1)
            }
            Second::More(more) => {
                second = more.clone();
                None
            }
        };
        if next_sentence.is_some() {
            self.truncate(found, &mut first, &mut second);
        }
        if let Some(starts) = sentences {
            sentence_starts(reader, document, (chunk.sentence, first.clone()), rules.separator, (0, starts))?;
        }
        let slots = self.slots(chunk);
        let (ids, segments) = lay_out(slots, settings.sequence_length, |text, ids| match text {
            Text::First => {
                ids.extend(ends.filter(|_| first.start == 0));
                read_sentences(reader, document, (chunk.sentence, first.clone()), rules.separator, ids)?;
                ids.extend(ends.filter(|_| first.end == document.len()));
                Ok(())
            }
            Text::Second => reader.read(&second_document, second.clone(), ids),
        })?;
        let (predicted, target, orders) = (Vec::new(), None, None);
        let document = found.at.unit;
        Ok(Instance { ids, segments, predicted, target, orders, next_sentence, document, random_document })
    }

    /// What stands around the texts of a chunk: nothing where spans are corrupted, whose source and target have ends of their own.
    fn slots(&self, chunk: &Chunk) -> &[Slot] {
        let Instances { template, corruption, .. } = &*self.instances;
        match (&chunk.second, corruption) {
            (_, Corruption::Spans(_)) => TEXT_ALONE,
            (Second::None, _) => template.single_slots(),
            _ => template.pair_slots(),
        }
    }

    /// A sequence of the row, with nothing hidden.
    fn of_row(
        &self,
        sequence: usize,
        reader: &mut Reader<'_>,
        mut sentences: Option<&mut Vec<usize>>,
    ) -> Result<Instance, DataError> {
        let Instances { settings, corpus, template, row, weights, corruption, .. } = &*self.instances;
        let (row, mut document) = (row.as_ref().ok_or_else(|| self.changed())?, 0);
        let bare = matches!(corruption, Corruption::Spans(_));
        let slots = if bare { TEXT_ALONE } else { template.single_slots() };
        let (ids, segments) = lay_out(slots, settings.sequence_length, |_, ids| {
            document = row.read(reader, corpus, weights, sequence, ids, sentences.as_deref_mut())?;
            Ok(())
        })?;
        let (predicted, target, orders) = (Vec::new(), None, None);
        let (next_sentence, random_document) = (None, None);
        Ok(Instance { ids, segments, predicted, target, orders, next_sentence, document, random_document })
    }

    /// Sentences of another document of this epoch, from a random one on until `target` pieces are reached or passed.
    /// BERT tries ten times to draw another document than its own; here all others are drawn from at once.
    fn random_second(
        &self,
        found: &Found,
        target: usize,
        reader: &mut Reader<'_>,
    ) -> Result<(usize, Document, Range<usize>), DataError> {
        let mut draws = draws::of_chunk(self.keys.second, found.at, found.number());
        let copies = u64::from(self.copies(found.at.unit, None));
        let own = found.entry - u64::from(found.at.copy);
        let draw = draws::below(&mut draws, self.entries - copies);
        let number = self.document_of(if draw < own { draw } else { draw + copies }, reader)?;
        let document = reader.document(number)?;
        let sentences = document.sentences();
        if sentences == 0 {
            return Err(self.changed());
        }
        // Sentences without pieces are not there: another is drawn.
        let (mut sentence, mut draws_made) = (draws.below(sentences as u32) as usize, 1_usize);
        while reader.sentence(&document, sentence)?.is_empty() {
            sentence = draws.below(sentences as u32) as usize;
            draws_made += 1;
            // Long enough that one with pieces would have come: are there any?
            if draws_made.is_multiple_of(sentences.saturating_mul(64)) && !reader.has_text(&document)? {
                return Err(self.changed());
            }
        }
        let mut range = reader.sentence(&document, sentence)?;
        while range.len() < target && sentence + 1 < sentences {
            sentence += 1;
            range.end = range.end.max(reader.sentence_end(&document, sentence)?);
        }
        Ok((number, document, range))
    }

    /// Takes pieces off the longer segment (B where both are equal) until the two fit, each at the front or the back.
    fn truncate(&self, found: &Found, first: &mut Range<usize>, second: &mut Range<usize>) {
        let room = self.instances.room;
        if first.len() + second.len() <= room {
            return;
        }
        let mut coins = Coins::new(draws::of_chunk(self.keys.truncation, found.at, found.number()));
        while first.len() + second.len() > room {
            let longer = if first.len() > second.len() { &mut *first } else { &mut *second };
            if coins.toss() {
                longer.start += 1;
            } else {
                longer.end -= 1;
            }
        }
    }

    /// The chunk of instance `index`, in the order of the documents: the last mark before it, then a short walk.
    fn find(&self, index: u64, reader: &mut Reader<'_>) -> Result<Found, DataError> {
        if self.marks.is_empty() {
            return Ok(Found { at: Copy { unit: index as usize, copy: 0 }, entry: index, chunk: None });
        }
        let mark = self.marks[self.marks.partition_point(|mark| mark.instance <= index) - 1];
        let Mark { mut instance, mut entry, mut at, mut cursor } = mark;
        while at.unit < self.instances.units() {
            let document = self.document(at.unit, reader)?;
            while at.copy < self.copies(at.unit, document) {
                if let Some(from) = document {
                    let mut walk = self.walk(from, at, cursor);
                    while let Some(chunk) = walk.next(reader)? {
                        if instance == index {
                            return Ok(Found { at, entry, chunk: Some((from, chunk)) });
                        }
                        instance += 1;
                    }
                } else {
                    if instance == index {
                        return Ok(Found { at, entry, chunk: None });
                    }
                    instance += 1;
                }
                cursor = Cursor::default();
                at.copy += 1;
                entry += 1;
            }
            at = Copy { unit: at.unit + 1, copy: 0 };
        }
        Err(self.changed())
    }

    /// The document of an entry.
    fn document_of(&self, entry: u64, reader: &mut Reader<'_>) -> Result<usize, DataError> {
        if self.plain {
            return Ok(entry as usize);
        }
        let mark = self.marks[self.marks.partition_point(|mark| mark.entry <= entry) - 1];
        let (mut unit, mut end) = (mark.at.unit, mark.entry);
        let mut before = mark.at.copy;
        while unit < self.instances.units() {
            let copies = self.copies(unit, self.document(unit, reader)?);
            end += u64::from(copies.saturating_sub(before));
            if entry < end {
                return Ok(unit);
            }
            (unit, before) = (unit + 1, 0);
        }
        Err(self.changed())
    }

    /// What was counted is no longer there.
    fn changed(&self) -> DataError {
        self.instances.corpus.changed()
    }

    fn walk(&self, document: Document, at: Copy, cursor: Cursor) -> Walk {
        let Instances { settings, room, rules, template, .. } = &*self.instances;
        let how = (*room, *rules, Consecutive::new(settings, template));
        Walk::new(document, settings, how, self.keys.walk, at, cursor)
    }

    /// The document that a unit is, unless it is a sequence of a row.
    fn document(&self, unit: usize, reader: &mut Reader<'_>) -> Result<Option<Document>, DataError> {
        self.instances.row.is_none().then(|| reader.document(unit)).transpose()
    }

    /// How often a unit comes in this epoch.
    fn copies(&self, unit: usize, document: Option<Document>) -> u32 {
        let Instances { weights, row, .. } = &*self.instances;
        if document.is_some_and(|document| document.is_empty()) {
            return 0;
        }
        let source = row.as_ref().map_or_else(|| weights.source_of(unit), |row| row.source_of(unit));
        weights.copies(self.keys.copies, unit, source)
    }

    /// Counts everything, on so many threads; the result does not depend on how many.
    fn count_groups(&self, threads: usize) -> Result<Vec<Group>, DataError> {
        let groups = self.instances.units().div_ceil(GROUP);
        // A thread is worth its start only for some work.
        let threads = threads.min(groups / 4);
        let counted =
            in_threads(threads, 0..groups, |group| self.count_group(group, &mut self.instances.corpus.reader()));
        counted.into_iter().collect()
    }

    fn count_group(&self, group: usize, reader: &mut Reader<'_>) -> Result<Group, DataError> {
        let units = group * GROUP..((group + 1) * GROUP).min(self.instances.units());
        let at = Copy { unit: units.start, copy: 0 };
        let mark = Mark { instance: 0, entry: 0, at, cursor: Cursor::default() };
        let mut counted = Group { marks: vec![mark], instances: 0, entries: 0, units: 0 };
        let mut work = 0;
        for unit in units {
            let document = self.document(unit, reader)?;
            let copies = self.copies(unit, document);
            counted.units += u64::from(copies > 0);
            for copy in 0..copies {
                let at = Copy { unit, copy };
                counted.entries += 1;
                let Some(document) = document else {
                    counted.instances += 1;
                    continue;
                };
                let mut walk = self.walk(document, at, Cursor::default());
                loop {
                    let cursor = walk.cursor;
                    if work >= BETWEEN_MARKS {
                        let (instance, entry) = (counted.instances, counted.entries - 1);
                        counted.marks.push(Mark { instance, entry, at, cursor });
                        work = 0;
                    }
                    if walk.next(reader)?.is_none() {
                        break;
                    }
                    counted.instances += 1;
                    work += 1 + walk.cursor.sentence - cursor.sentence;
                }
            }
        }
        Ok(counted)
    }
}

/// A text with nothing around it.
const TEXT_ALONE: &[Slot] = &[Slot::First { segment: 0 }];

/// One of the two texts of a template.
enum Text {
    First,
    Second,
}

/// The ids and segments of a sequence: a template's special tokens around the texts that `append` adds.
fn lay_out(
    slots: &[Slot],
    length: usize,
    mut append: impl FnMut(Text, &mut Vec<u32>) -> Result<(), DataError>,
) -> Result<(Vec<u32>, Vec<u32>), DataError> {
    let (mut ids, mut segments) = (Vec::with_capacity(length), Vec::with_capacity(length));
    for slot in slots {
        let segment = match *slot {
            Slot::Special { id, segment } => {
                ids.push(id);
                segment
            }
            Slot::First { segment } => {
                append(Text::First, &mut ids)?;
                segment
            }
            Slot::Second { segment } => {
                append(Text::Second, &mut ids)?;
                segment
            }
        };
        segments.resize(ids.len(), segment);
    }
    Ok((ids, segments))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Corpus, InstanceSettings, Vocabulary, WordMarks};
    use henson_text::Template;

    /// However long documents are, and however many of them are small, no instance is far from a mark.
    #[test]
    fn marks_are_near() {
        let words = WordMarks::Begin(vec![true; 10]);
        let vocabulary = Vocabulary {
            size: 10,
            cls: 0,
            sep: 1,
            mask: Some(2),
            special: vec![0, 1, 2],
            words,
            sentinels: Vec::new(),
        };
        let mut documents = vec![vec![vec![5; 3]; 1]; 1000];
        documents.push(vec![vec![5; 3]; 50_000]);
        documents.push(vec![vec![5; 300_000]]);
        let corpus = Arc::new(Corpus::from_documents(vocabulary, &documents));
        for objective in [crate::Objective::MlmNsp, crate::Objective::Mlm] {
            let settings = InstanceSettings { objective, short_sequences: 0.0, ..InstanceSettings::default() };
            let instances = Arc::new(Instances::new(corpus.clone(), Template::bert(0, 1), settings, 1).unwrap());
            let epoch = Epoch::new(&instances, 0, 1).unwrap();
            let mut ends = epoch.marks[1..].iter().map(|mark| mark.instance).chain([epoch.count]);
            assert!(epoch.marks.iter().all(|mark| ends.next().unwrap() - mark.instance <= BETWEEN_MARKS as u64));
            // And there are no more than needed.
            let work = documents.len() / GROUP + (epoch.count as usize + 2 * 51_000) / BETWEEN_MARKS;
            assert!(epoch.marks.len() <= work + 2, "{} marks", epoch.marks.len());
        }
    }
}
