//! Layers and one file per model family: config, forward, heads and checkpoint names; knows no files, losses or
//! tokenizers.
#![forbid(unsafe_code)]

#[macro_use]
mod family;

mod albert;
mod bart;
mod batch;
mod beams;
mod bert;
mod bilstm;
pub mod blocks;
mod boundary;
pub mod characters;
mod config;
mod deberta;
mod decoder;
mod distilbert;
mod electra;
mod elmo;
mod encoder;
mod encoder_decoder;
mod gpt;
mod gpt2;
mod heads;
mod layers;
mod lstm_lm;
mod marian;
mod model;
mod modernbert;
mod mpnet;
mod naming;
mod openai_gpt;
mod post_norm;
pub mod probe;
pub mod recurrent;
mod rnn_seq2seq;
mod roberta;
mod streams;
mod t5;
mod xlnet;

pub use batch::{Batch, InputError, Sequence};
pub use beams::BeamHead;
pub use boundary::BOUNDARY_TARGETS;
pub use config::{ConfigError, FineTuning, HiddenActivation, Sizes, SpecialIds, TargetReading, WordVocabulary};
pub use decoder::{CacheSizes, Decoder, DecoderCache, NewTokens, Writing};
pub use family::{Arrays, Family, NamedSize, Original};
pub use heads::Head;
pub use model::{Capture, Encoded, LinearHead, Model, Network};
pub use naming::Naming;
pub use streams::{Memory, MemorySettings, Permutation};

families! {
    /// BERT.
    Bert(bert::BertConfig, bert::FAMILY),
    /// RoBERTa, XLM-R and CamemBERT.
    Roberta(roberta::RobertaConfig, roberta::FAMILY),
    /// DistilBERT.
    DistilBert(distilbert::DistilBertConfig, distilbert::FAMILY),
    /// MPNet.
    MpNet(mpnet::MpNetConfig, mpnet::FAMILY),
    /// ELECTRA.
    Electra(electra::ElectraConfig, electra::FAMILY),
    /// ALBERT.
    Albert(albert::AlbertConfig, albert::FAMILY),
    /// ModernBERT and Ettin.
    ModernBert(modernbert::ModernBertConfig, modernbert::FAMILY),
    /// DeBERTa-v2 and v3.
    DebertaV2(deberta::DebertaV2Config, deberta::FAMILY),
    /// T5, T5 v1.1, Flan-T5 and mT5.
    T5(t5::T5Config, t5::FAMILY),
    /// BART.
    Bart(bart::BartConfig, bart::FAMILY),
    /// Marian: the transformer of Vaswani et al. (2017).
    Marian(marian::MarianConfig, marian::FAMILY),
    /// GPT-2.
    Gpt2(gpt2::Gpt2Config, gpt2::FAMILY),
    /// GPT.
    OpenAiGpt(openai_gpt::OpenAiGptConfig, openai_gpt::FAMILY),
    /// XLNet.
    XlNet(xlnet::XlNetConfig, xlnet::FAMILY),
    /// LSTM language models.
    LstmLm(lstm_lm::LstmLmConfig, lstm_lm::FAMILY),
    /// Recurrent encoder-decoders with attention.
    RnnSeq2Seq(rnn_seq2seq::RnnSeq2SeqConfig, rnn_seq2seq::FAMILY),
    /// BiLSTM taggers and classifiers.
    BiLstm(bilstm::BiLstmConfig, bilstm::FAMILY),
    /// ELMo.
    Elmo(elmo::ElmoConfig, elmo::FAMILY),
}

/// Models as their authors published them, where that is not a directory of `transformers`.
pub static ORIGINALS: &[Original] = &[elmo::ORIGINAL];
