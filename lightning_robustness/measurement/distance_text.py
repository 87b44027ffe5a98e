import math

from lightning_robustness.utilities.input_space import InputSpace


def describe_distance(distance: float, input_space: InputSpace | None = None) -> str:
    """Write a distance between inputs, such as that to the decision boundary, as in papers.

    Args:
        distance: The distance, in un-normalised units.
        input_space: Range of the inputs, by default [0, 1]. Distances between pixels from 0 to 1 are written in steps
            of 8 bits, others as they are.

    Example:
        >>> from lightning_robustness import InputSpace
        >>> from lightning_robustness.measurement.distance_text import describe_distance
        >>> describe_distance(0.0121), describe_distance(-0.5 / 255), describe_distance(0.7, InputSpace(low=-1.0))
        ('3.1/255', '-0.5/255', '0.7')

    """
    is_unit_range = input_space is None or (input_space.low, input_space.high) == (0, 1)
    if not math.isfinite(distance):
        return "infinite" if distance > 0 else str(distance)
    return f"{255 * distance:.1f}/255" if is_unit_range else f"{distance:.3g}"
