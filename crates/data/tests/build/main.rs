//! Files into corpora and back, in one binary so that it is linked once.

mod damage;
mod formats;
mod splits;
mod support;
mod whole;
