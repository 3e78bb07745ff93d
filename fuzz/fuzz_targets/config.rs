//! Bytes as a config.json: whatever is accepted can be written and means the same when it is read again.
#![no_main]

use henson_models::BertConfig;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let Ok(config) = BertConfig::from_json(text) else { return };
    let Ok(written) = config.to_json() else { return };
    let again = BertConfig::from_json(&written.to_string()).expect("what was written can be read");
    assert_eq!(again.to_json().expect("what was read again can be written"), written);
});
