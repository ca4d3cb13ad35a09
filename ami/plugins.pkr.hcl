# Alone in its file: Packer before 1.7, as Debian has it, takes no required_plugins, and tests leave this file out there.
packer {
  required_version = ">= 1.10.0"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "= 1.3.9" # packer-amazon in versions.yaml
    }
  }
}
