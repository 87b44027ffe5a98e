"""Numbers of the papers, for those of their networks that have a scaled-down version here."""

# Tables 1 and 2 of the RDI paper: seconds of RDI and ROBY by the number of classes, of RDI and PGD by model
RDI_CLASSES = {10: (3.42, 3.95), 100: (4.12, 19.84), 200: (8.82, 220.22)}
RDI_SECONDS = {
    "alexnet": (3.38, 11.50),
    "mobilenet": (3.05, 65.77),
    "resnet": (3.61, 108.52),
    "densenet": (4.63, 138.66),
    "resnet-deep": (5.36, 162.91),
}
# Table 3 of the RDI paper: accuracy, ROBY, RDI, mean success rate of four attacks
RDI_MODELS = {
    "mnist": {
        "alexnet": (0.9916, 0.5555, 0.5874, 0.7819),
        "resnet": (0.9895, 0.5464, 0.6566, 0.7340),
        "densenet": (0.9911, 0.4598, 0.7127, 0.6140),
        "mobilenet": (0.9851, 0.6523, 0.7251, 0.5485),
        "resnet-deep": (0.9868, 0.5775, 0.7324, 0.4972),
    },
    "fashion-mnist": {
        "mobilenet": (0.9124, 0.5439, 0.3872, 0.8690),
        "alexnet": (0.9125, 0.5275, 0.5014, 0.7686),
        "resnet": (0.9121, 0.4846, 0.5603, 0.7560),
        "resnet-deep": (0.9123, 0.4640, 0.6169, 0.6933),
        "densenet": (0.9040, 0.6183, 0.6289, 0.6583),
    },
}
# Table 4 of the RDI paper: accuracy, ROBY, RDI, success rate of SirenAttack
RDI_SPEECH = {
    "m5-attention": (0.9067, 0.3837, 0.4305, 0.8071),
    "m5": (0.9575, 0.4753, 0.4749, 0.7148),
    "speech-cnn": (0.9251, 0.4608, 0.5955, 0.5986),
    "speech-transformer-1": (0.9116, 0.4419, 0.6060, 0.5408),
    "speech-transformer-2": (0.9028, 0.4932, 0.6278, 0.5204),
}
# Table I of the ROBY paper: ASR, FSA, FSD and ROBY in the l-infinity norm, then in the l2 norm
ROBY_MODELS = {
    "mnist": {
        "mobilenet": (0.6559, 0.8553, 0.6222, 0.2557, 0.8912, 0.8674, 0.7382, 0.2948),
        "resnet-deep": (0.8221, 0.6706, 0.5754, 0.4002, 0.9137, 0.7452, 0.4680, 0.4525),
        "densenet": (0.8794, 0.5411, 0.5207, 0.4859, 0.9371, 0.6101, 0.4205, 0.5671),
        "resnet": (0.8996, 0.4737, 0.4865, 0.5006, 0.9459, 0.5881, 0.4169, 0.5986),
        "alexnet": (0.9217, 0.4703, 0.4486, 0.5512, 0.9586, 0.5623, 0.4117, 0.6054),
    },
    "fashion-mnist": {
        "mobilenet": (0.8071, 0.8113, 0.8004, 0.2573, 0.9124, 0.7872, 0.5457, 0.2721),
        "densenet": (0.8486, 0.7757, 0.6819, 0.2954, 0.9397, 0.7815, 0.5248, 0.3763),
        "resnet": (0.8763, 0.7001, 0.4717, 0.3907, 0.9486, 0.7442, 0.4707, 0.4295),
        "resnet-deep": (0.8816, 0.5886, 0.4375, 0.4513, 0.9518, 0.6864, 0.4493, 0.4842),
        "alexnet": (0.9071, 0.5007, 0.3521, 0.5520, 0.9690, 0.5523, 0.4482, 0.5772),
    },
}
# Tables II and III of the ROBY paper: Pearson's correlation of FSA, FSD and ROBY with ASR
ROBY_PEARSON = {
    "linf": {"mnist": (-0.93, -0.90, 0.96), "fashion-mnist": (-0.93, -0.91, 0.97)},
    "l2": {"mnist": (-0.99, -0.92, 0.97), "fashion-mnist": (-0.91, -0.91, 0.98)},
}
# Table IV of the ROBY paper: ROBY in l2 and l-infinity (columns) with ASR in l2 and l-infinity (rows)
ROBY_CROSS = {"l2": (0.976, 0.973), "linf": (0.960, 0.940)}
# Table V of the ROBY paper: ROBY of natural and robust networks on clean samples, then on adversarial ones
ROBY_ROBUST = {
    "mnist": {
        "mobilenet": (0.2948, 0.2908, 0.6051, 0.3891),
        "resnet-deep": (0.4525, 0.4452, 0.4754, 0.2937),
        "densenet": (0.5671, 0.5607, 0.5480, 0.5098),
        "resnet": (0.5986, 0.5423, 0.5686, 0.3588),
        "alexnet": (0.6054, 0.5909, 0.5938, 0.4595),
    },
    "fashion-mnist": {
        "mobilenet": (0.2721, 0.2716, 0.3821, 0.2857),
        "densenet": (0.3763, 0.3743, 0.4904, 0.4449),
        "resnet": (0.4295, 0.4077, 0.4193, 0.3936),
        "resnet-deep": (0.4842, 0.3422, 0.3804, 0.3489),
        "alexnet": (0.5772, 0.5428, 0.6909, 0.6729),
    },
}
# Tables VI and VII of the ROBY paper, on MNIST: accuracy, ASR, ROBY
ROBY_WIDTHS = {
    "fc-2x100": (0.9790, 0.9998, 0.5503),
    "fc-2x500": (0.9821, 0.9979, 0.5497),
    "fc-2x1000": (0.9797, 0.9972, 0.5462),
    "fc-2x2000": (0.9761, 0.9824, 0.5428),
}
# Table 3 of the CMMR paper
CMMR_WEIGHTS = {"accuracy": 0.49, "ssim": 0.12, "psnr": 0.12, "mse": 0.12, "ald2": 0.07}
# Tables 3 and 4 of the Fisher information paper, on CIFAR-10: Lipschitz constant, CLEVER as computed there (lower is
# more robust), success of C&W and PGD in percent, Fisher norm, its inverse
FISHER_COLUMNS = ("lipschitz", "clever", "cw", "pgd", "fim", "fim_inverse")
FISHER_ROBUST = {
    "natural": (0.50, 3.52, 93.64, 99.24, 2.38, 46.46),
    "cw": (0.29, 2.02, 29.60, 86.67, 0.82, 186.46),
}
FISHER_MODELS = {
    "densenet": (0.47, 2.93, 54.55, 94.81, 2.18, 5.16),
    "resnet": (0.29, 1.99, 22.97, 89.19, 0.77, 124.61),
    "vit": (0.25, 1.35, 39.39, 96.97, 0.61, 77.36),
    "vgg": (0.07, 1.11, 14.29, 55.95, 0.09, 97685.6),
}
