use std::time::Instant;
use henson_checkpoint::*;
use henson_models::*;
use henson_tensor::*;
fn main() {
    let config = BertConfig::of_size(Size::Base);
    let device = Device::cpu(None, None).unwrap();
    let make = || { let mut b = Builder::new(); Bert::build(&mut b, &config, Head::PreTraining); b.finish(&device, DType::F32).unwrap() };
    let mut p = make();
    p.initialise(1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (dtype, name) in [(SaveDType::F32, "f32"), (SaveDType::Bf16, "bf16"), (SaveDType::F16, "f16")] {
        let t = Instant::now();
        save(&dir.path().join(name), &[], &config.to_json().unwrap(), &p, dtype, &SaveOptions::default()).unwrap();
        let s = t.elapsed();
        let mut q = make();
        for _ in 0..2 {
            let t = Instant::now();
            let w = Weights::open(&dir.path().join(name)).unwrap();
            let o = t.elapsed();
            let r = load(&w, &bert::NAMING, &mut q, &LoadOptions::strict()).unwrap();
            assert!(r.is_clean());
            eprintln!("{name}: save {s:?}, open {o:?}, load {:?}, {} params", t.elapsed(), p.count());
        }
    }
}
