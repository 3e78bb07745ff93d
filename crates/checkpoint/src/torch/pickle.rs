//! The part of Python's pickle machine that state dicts use, over values that cannot do anything.
//!
//! Lists, dictionaries and tuples lie in tables and values name their rows, so that a structure may contain itself, be shared
//! a million times or nest without end: nothing here walks or frees it recursively.

use std::collections::HashMap;
use std::ops::Range;

use super::{Bytes, MAGIC, TorchError, storage_dtype};
use crate::safetensors::{DIMENSION_LIMIT, StoredDType};

/// The largest pickle that is read. One of a model with a thousand tensors has 150 KB.
pub(super) const PICKLE_LIMIT: u64 = 32 << 20;

/// The most operations of one pickle: a tensor takes about thirty. Each makes at most one value, so that this bounds the
/// stack, the memo and all tables.
const OPERATION_LIMIT: u64 = 1 << 20;

const TENSOR_LIMIT: usize = 1 << 16;

/// The longest string; names of parameters have a hundred bytes.
const TEXT_LIMIT: u64 = 1 << 20;

/// The longest name of a module or of something in it.
const NAME_LIMIT: usize = 256;

const BUFFER: u64 = 1 << 13;

/// What stands on the stack: small, and free to copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// What older files begin with. No other number of a state dict has more than 64 bits.
    Magic,
    Float,
    Text(usize),
    Tuple(usize),
    List(usize),
    Dict(usize),
    Global(Global),
    Storage(usize),
    Tensor(usize),
}

impl Value {
    /// What it is, for messages.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a truth value",
            Self::Int(_) | Self::Magic | Self::Float => "a number",
            Self::Text(_) => "a string",
            Self::Tuple(_) => "a tuple",
            Self::List(_) => "a list",
            Self::Dict(_) => "a dictionary",
            Self::Global(_) => "a class or function",
            Self::Storage(_) => "a storage",
            Self::Tensor(_) => "a tensor",
        }
    }
}

/// All that is known of Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(StoredDType),
}

impl Global {
    fn find(module: &str, name: &str) -> Option<Self> {
        match (module, name) {
            ("collections", "OrderedDict") => Some(Self::OrderedDict),
            ("torch._utils", "_rebuild_tensor_v2") => Some(Self::RebuildTensor),
            ("torch._utils", "_rebuild_parameter") => Some(Self::RebuildParameter),
            ("torch", class) => storage_dtype(class).map(Self::Storage),
            _ => None,
        }
    }
}

/// Numbers of one kind somewhere in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storage {
    pub(super) dtype: StoredDType,
    /// A string, its name in the file.
    pub(super) key: Value,
    pub(super) elements: u64,
}

/// A view of a storage; not yet checked against it. Shape and strides have the same length.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) storage: usize,
    pub(super) offset: u64,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

/// A pickle that was read, with all that its values name.
#[derive(Debug)]
pub(super) struct Pickle {
    pub(super) root: Value,
    pub(super) storages: Vec<Storage>,
    pub(super) tensors: Vec<Tensor>,
    texts: Vec<String>,
    /// Tuples and lists.
    sequences: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
}

impl Pickle {
    /// Reads one pickle, to its STOP.
    pub(super) fn read(input: &mut Input<'_>) -> Result<Self, TorchError> {
        let pickle = Self {
            root: Value::None,
            storages: Vec::new(),
            tensors: Vec::new(),
            texts: Vec::new(),
            sequences: Vec::new(),
            dicts: Vec::new(),
        };
        let mut machine = Machine { input, pickle, stack: Vec::new(), marks: Vec::new(), memo: HashMap::new(), at: 0 };
        let start = machine.input.position();
        for _ in 0..OPERATION_LIMIT {
            if machine.input.position() - start > PICKLE_LIMIT {
                return Err(TorchError::Limit { what: "bytes in its pickle", limit: PICKLE_LIMIT });
            }
            if let Some(root) = machine.step()? {
                return Ok(Self { root, ..machine.pickle });
            }
        }
        Err(TorchError::Limit { what: "operations in its pickle", limit: OPERATION_LIMIT })
    }

    pub(super) fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::Text(text) => Some(&self.texts[text]),
            _ => None,
        }
    }

    /// What is in a tuple or list.
    pub(super) fn items(&self, value: Value) -> Option<&[Value]> {
        match value {
            Value::Tuple(sequence) | Value::List(sequence) => Some(&self.sequences[sequence]),
            _ => None,
        }
    }

    /// What is in a dictionary, in the order of the file; keys may repeat.
    pub(super) fn entries(&self, value: Value) -> Option<&[(Value, Value)]> {
        match value {
            Value::Dict(dict) => Some(&self.dicts[dict]),
            _ => None,
        }
    }

    fn sequence(&mut self, items: Vec<Value>) -> usize {
        self.sequences.push(items);
        self.sequences.len() - 1
    }

    fn dict(&mut self) -> Value {
        self.dicts.push(Vec::new());
        Value::Dict(self.dicts.len() - 1)
    }

    /// Sizes or strides: a tuple of few numbers that are not negative.
    fn sizes(&self, value: Value) -> Option<Vec<usize>> {
        let Value::Tuple(_) = value else { return None };
        let items = self.items(value)?;
        let size = |value: &Value| match value {
            Value::Int(size) => usize::try_from(*size).ok(),
            _ => None,
        };
        (items.len() <= DIMENSION_LIMIT).then(|| items.iter().map(size).collect())?
    }
}

/// A buffered part of a file.
pub(super) struct Input<'a> {
    bytes: &'a dyn Bytes,
    /// What is not in the buffer yet.
    rest: Range<u64>,
    buffer: Vec<u8>,
    used: usize,
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a dyn Bytes, range: Range<u64>) -> Self {
        Self { bytes, rest: range, buffer: Vec::new(), used: 0 }
    }

    /// The next byte's place in the file.
    pub(super) fn position(&self) -> u64 {
        self.rest.start - (self.buffer.len() - self.used) as u64
    }

    fn byte(&mut self) -> Result<u8, TorchError> {
        Ok(self.array::<1>()?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], TorchError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn text(&mut self, length: u64) -> Result<String, TorchError> {
        if length > TEXT_LIMIT {
            return Err(TorchError::Limit { what: "bytes in a string", limit: TEXT_LIMIT });
        }
        let at = self.position();
        // Within what is there, before anything is allocated.
        if length > self.rest.end - at {
            return Err(self.cut(at + length));
        }
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| TorchError::Pickle { at, problem: "a string is not UTF-8" })
    }

    /// A name up to the end of its line.
    fn line(&mut self) -> Result<String, TorchError> {
        let at = self.position();
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => return Ok(String::from_utf8_lossy(&line).into_owned()),
                _ if line.len() == NAME_LIMIT => return Err(TorchError::Pickle { at, problem: "a name has no end" }),
                byte => line.push(byte),
            }
        }
    }

    fn fill(&mut self, mut bytes: &mut [u8]) -> Result<(), TorchError> {
        while !bytes.is_empty() {
            if self.used == self.buffer.len() {
                let length = (self.rest.end - self.rest.start).min(BUFFER);
                if length == 0 {
                    return Err(self.cut(self.rest.end + bytes.len() as u64));
                }
                self.buffer.resize(length as usize, 0);
                self.bytes.read_exact(self.rest.start, &mut self.buffer)?;
                self.rest.start += length;
                self.used = 0;
            }
            let count = bytes.len().min(self.buffer.len() - self.used);
            let (now, later) = bytes.split_at_mut(count);
            now.copy_from_slice(&self.buffer[self.used..self.used + count]);
            self.used += count;
            bytes = later;
        }
        Ok(())
    }

    fn cut(&self, end: u64) -> TorchError {
        TorchError::Cut { what: "its pickle".to_owned(), end, size: self.rest.end }
    }
}

struct Machine<'i, 'a> {
    input: &'i mut Input<'a>,
    pickle: Pickle,
    stack: Vec<Value>,
    /// How high the stack was at each MARK.
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
    /// Where the operation stands that is being done.
    at: u64,
}

impl Machine<'_, '_> {
    /// Does one operation; STOP gives the result. The names are those of Python's pickletools.
    fn step(&mut self) -> Result<Option<Value>, TorchError> {
        self.at = self.input.position();
        match self.input.byte()? {
            // PROTO: 3 differs from 2 in kinds of values only.
            0x80 => match self.input.byte()? {
                2 | 3 => {}
                version => return Err(self.unsupported(format!("protocol {version}"))),
            },
            // STOP
            b'.' => {
                let root = self.pop()?;
                return match self.stack.is_empty() && self.marks.is_empty() {
                    true => Ok(Some(root)),
                    false => Err(self.wrong("it ends with values left over")),
                };
            }
            // MARK
            b'(' => self.marks.push(self.stack.len()),
            operation @ (b'N' | 0x88 | 0x89 | b'J' | b'K' | b'M' | 0x8a | b'G') => {
                let value = self.scalar(operation)?;
                self.stack.push(value);
            }
            // BINUNICODE
            b'X' => {
                let length = u32::from_le_bytes(self.input.array()?);
                let text = self.input.text(length.into())?;
                self.pickle.texts.push(text);
                self.stack.push(Value::Text(self.pickle.texts.len() - 1));
            }
            // EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE
            b')' => self.tuple(0)?,
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b't' => {
                let count = self.stack.len() - self.unmark()?;
                self.tuple(count)?;
            }
            // EMPTY_LIST, APPEND, APPENDS
            b']' => {
                let list = self.pickle.sequence(Vec::new());
                self.stack.push(Value::List(list));
            }
            b'a' => self.append(1)?,
            b'e' => {
                let count = self.stack.len() - self.unmark()?;
                self.append(count)?;
            }
            // EMPTY_DICT, SETITEM, SETITEMS
            b'}' => {
                let dict = self.pickle.dict();
                self.stack.push(dict);
            }
            b's' => self.set_items(2)?,
            b'u' => {
                let count = self.stack.len() - self.unmark()?;
                self.set_items(count)?;
            }
            // BINPUT, LONG_BINPUT, BINGET, LONG_BINGET
            b'q' => {
                let place = self.input.byte()?;
                self.put(place.into())?;
            }
            b'r' => {
                let place = u32::from_le_bytes(self.input.array()?);
                self.put(place)?;
            }
            b'h' => {
                let place = self.input.byte()?;
                self.get(place.into())?;
            }
            b'j' => {
                let place = u32::from_le_bytes(self.input.array()?);
                self.get(place)?;
            }
            // GLOBAL, and INST, which is a GLOBAL with a call
            operation @ (b'c' | b'i') => self.global(operation == b'i')?,
            // REDUCE, BUILD, BINPERSID
            b'R' => self.reduce()?,
            b'b' => self.build()?,
            b'Q' => self.storage()?,
            operation => return Err(self.unsupported(format!("the operation 0x{operation:02x}"))),
        }
        Ok(None)
    }

    fn scalar(&mut self, operation: u8) -> Result<Value, TorchError> {
        Ok(match operation {
            // NEWTRUE, NEWFALSE
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            // BININT, BININT1, BININT2, LONG1, BINFLOAT
            b'J' => Value::Int(i32::from_le_bytes(self.input.array()?).into()),
            b'K' => Value::Int(self.input.byte()?.into()),
            b'M' => Value::Int(u16::from_le_bytes(self.input.array()?).into()),
            0x8a => self.long()?,
            b'G' => {
                self.input.array::<8>()?;
                Value::Float
            }
            // NONE
            _ => Value::None,
        })
    }

    fn long(&mut self) -> Result<Value, TorchError> {
        let length = usize::from(self.input.byte()?);
        let mut bytes = [0; 16];
        let Some(digits) = bytes.get_mut(..length) else {
            return Err(self.unsupported(format!("a number of {length} bytes")));
        };
        self.input.fill(digits)?;
        // In two's complement: the highest bit that is there counts as its negative.
        if length > 0 && bytes[length - 1] & 0x80 != 0 {
            bytes[length..].fill(0xff);
        }
        let number = i128::from_le_bytes(bytes);
        match i64::try_from(number) {
            Ok(number) => Ok(Value::Int(number)),
            Err(_) if number == MAGIC => Ok(Value::Magic),
            Err(_) => Err(self.unsupported(format!("a number of {length} bytes"))),
        }
    }

    fn tuple(&mut self, count: usize) -> Result<(), TorchError> {
        let items = self.take(count)?;
        let tuple = self.pickle.sequence(items);
        self.stack.push(Value::Tuple(tuple));
        Ok(())
    }

    fn append(&mut self, count: usize) -> Result<(), TorchError> {
        let items = self.take(count)?;
        let Some(Value::List(list)) = self.top() else {
            return Err(self.wrong("something is appended to what is not a list"));
        };
        self.pickle.sequences[list].extend(items);
        Ok(())
    }

    fn set_items(&mut self, count: usize) -> Result<(), TorchError> {
        let items = self.take(count)?;
        let (pairs, []) = items.as_chunks() else {
            return Err(self.wrong("a dictionary has a key without a value"));
        };
        let Some(Value::Dict(dict)) = self.top() else {
            return Err(self.wrong("an entry is added to what is not a dictionary"));
        };
        self.pickle.dicts[dict].extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(())
    }

    fn put(&mut self, place: u32) -> Result<(), TorchError> {
        let value = self.top().ok_or_else(|| self.wrong("nothing is there to be noted"))?;
        self.memo.insert(place, value);
        Ok(())
    }

    fn get(&mut self, place: u32) -> Result<(), TorchError> {
        let value = self.memo.get(&place).copied().ok_or_else(|| self.wrong("it uses what was not noted"))?;
        self.stack.push(value);
        Ok(())
    }

    fn global(&mut self, is_called: bool) -> Result<(), TorchError> {
        let (module, name) = (self.input.line()?, self.input.line()?);
        match Global::find(&module, &name) {
            Some(global) if !is_called => self.stack.push(Value::Global(global)),
            _ => {
                let name = format!("{module}.{name}").escape_debug().to_string();
                return Err(TorchError::Global { name });
            }
        }
        Ok(())
    }

    /// What the call of a known function would give.
    fn reduce(&mut self) -> Result<(), TorchError> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let wrong = || self.wrong("a known function is called with wrong arguments");
        let arguments = self.pickle.items(arguments).ok_or_else(wrong)?;
        let result = match (function, arguments) {
            (Value::Global(Global::OrderedDict), []) => self.pickle.dict(),
            // Storage, offset, sizes, strides, whether it wants gradients, its hooks.
            (
                Value::Global(Global::RebuildTensor),
                &[Value::Storage(storage), Value::Int(offset), shape, strides, _, _],
            ) => {
                let offset = u64::try_from(offset).map_err(|_| wrong())?;
                let (shape, strides) = (self.pickle.sizes(shape), self.pickle.sizes(strides));
                let (Some(shape), Some(strides)) = (shape, strides) else { return Err(wrong()) };
                if shape.len() != strides.len() {
                    return Err(wrong());
                }
                if self.pickle.tensors.len() == TENSOR_LIMIT {
                    return Err(TorchError::Limit { what: "tensors", limit: TENSOR_LIMIT as u64 });
                }
                self.pickle.tensors.push(Tensor { storage, offset, shape, strides });
                Value::Tensor(self.pickle.tensors.len() - 1)
            }
            (Value::Global(Global::RebuildTensor), [_, _, _, _, _, _, _]) => {
                return Err(self.unsupported("a tensor with metadata (conjugated or negated)".to_owned()));
            }
            (Value::Global(Global::RebuildParameter), &[tensor @ Value::Tensor(_), _, _]) => tensor,
            _ => return Err(wrong()),
        };
        self.stack.push(result);
        Ok(())
    }

    /// Attributes: a state dict has its modules' versions there, which are not needed.
    fn build(&mut self) -> Result<(), TorchError> {
        self.pop()?;
        match self.top() {
            Some(Value::Dict(_)) => Ok(()),
            _ => Err(self.wrong("attributes are set on what is not a dictionary")),
        }
    }

    /// A storage by its key: ("storage", class, key, device, elements), and in older files the view that it is of another.
    fn storage(&mut self) -> Result<(), TorchError> {
        let description = self.pop()?;
        let storage = match self.pickle.items(description) {
            Some(&[tag, Value::Global(Global::Storage(dtype)), key, _, Value::Int(elements)])
            | Some(&[tag, Value::Global(Global::Storage(dtype)), key, _, Value::Int(elements), Value::None])
                if self.pickle.text(tag) == Some("storage") && matches!(key, Value::Text(_)) =>
            {
                u64::try_from(elements).ok().map(|elements| Storage { dtype, key, elements })
            }
            _ => None,
        };
        self.pickle.storages.push(storage.ok_or_else(|| self.wrong("a storage is not described as PyTorch does"))?);
        self.stack.push(Value::Storage(self.pickle.storages.len() - 1));
        Ok(())
    }

    /// Takes the topmost values, the deepest first; none from below the last MARK.
    fn take(&mut self, count: usize) -> Result<Vec<Value>, TorchError> {
        let start = self.stack.len().checked_sub(count).filter(|start| *start >= self.floor());
        let start = start.ok_or_else(|| self.wrong("it takes more than there is"))?;
        Ok(self.stack.split_off(start))
    }

    fn pop(&mut self) -> Result<Value, TorchError> {
        match self.stack.len() > self.floor() {
            true => self.stack.pop().ok_or_else(|| self.wrong("it takes more than there is")),
            false => Err(self.wrong("it takes more than there is")),
        }
    }

    fn top(&self) -> Option<Value> {
        (self.stack.len() > self.floor()).then(|| self.stack.last().copied())?
    }

    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    /// How high the stack was at the last MARK, which is gone then.
    fn unmark(&mut self) -> Result<usize, TorchError> {
        self.marks.pop().ok_or_else(|| self.wrong("a mark is missing"))
    }

    fn wrong(&self, problem: &'static str) -> TorchError {
        TorchError::Pickle { at: self.at, problem }
    }

    fn unsupported(&self, what: String) -> TorchError {
        TorchError::Unsupported { what, at: self.at }
    }
}
