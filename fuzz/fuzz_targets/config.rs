//! Bytes as a config.json: whatever is accepted can be written and means the same when it is read again.
#![no_main]

use henson_checkpoint::Config;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let Ok(config) = Config::from_json(text) else { return };
    let Ok(written) = config.to_json() else { return };
    let again = Config::from_json(&written.to_string()).expect("what was written can be read");
    assert_eq!(again.to_json().expect("what was read again can be written"), written);
});
