//! Charts as SVG files: one or two panels side by side under a title, a legend below each.
//!
//! [`Figure`] is the data; drawing is one function, so that every chart of this program looks
//! alike. Text stands in space that nothing else uses (margins, legend rows), so labels cannot
//! overlap whatever the data.

mod charts;
mod draw;
mod scale;

pub use charts::{
    FenceSamples, Rounds, digest, fence, latencies, neighbours, note, stream, transfer,
};
pub use draw::draw;
pub use scale::{Axis, Scale, Shown};

/// A chart.
pub struct Figure {
    /// What it shows, in one line.
    pub title: String,
    /// Machine, conditions: one line under the title.
    pub note: String,
    /// Left to right; one or two.
    pub panels: Vec<Panel>,
}

/// One coordinate system.
pub struct Panel {
    /// What this panel shows.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// What is drawn, first at the back.
    pub series: Vec<Series>,
}

/// One line in a panel.
pub struct Series {
    /// Its name in the legend; an empty one is not listed.
    pub name: String,
    /// Which colour of the palette; see [`Ink`].
    pub ink: Ink,
    /// How it is drawn.
    pub stroke: Stroke,
    /// Points, ascending in x.
    pub points: Vec<(f64, f64)>,
}

/// A colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// The n-th of eight that stay apart for the colour-blind.
    Hue(usize),
    /// Grey: ceilings, controls, goals.
    Grey,
}

/// How a series is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stroke {
    /// A line.
    Solid,
    /// A line with a dot at each point.
    Dotted,
    /// A dashed line: a ceiling, a goal or a control.
    Dashed,
    /// A dashed line with a ring at each point.
    DashedDots,
}
