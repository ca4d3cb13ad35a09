# The build of an image, which `baretrain ami neuron build=true` (or cuda) runs with Packer.
build {
  sources = ["source.amazon-ebs.machine"]

  provisioner "file" {
    source      = var.files # a folder named baretrain
    destination = "/tmp/"
  }

  provisioner "shell" {
    execute_command = "sudo env {{ .Vars }} bash '{{ .Path }}'"
    scripts = [
      "${path.root}/provision/files.sh",
      "${path.root}/provision/common.sh",
      "${path.root}/provision/efa.sh",
      "${path.root}/provision/${var.image}.sh", # the accelerator's driver, runtime and tools
      "${path.root}/provision/baretrain.sh",
      "${path.root}/provision/harden.sh",
      "${path.root}/provision/smoke.sh",
    ]
  }
}
